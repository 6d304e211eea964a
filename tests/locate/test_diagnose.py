"""Why a step failed: every rule of the table, what it is told apart from, and the fixes that are tried."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from reprokit.compare.healthy import explained
from reprokit.grammar import plain_of, read
from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.kinds import Dead, Event, ExceptionRaised, NonFinite, Unlearned
from reprokit.program.ir import Phase
from reprokit.program.step import Step
from reprokit.render.expectation import expect
from reprokit.render.findings import markdown, one_line, page
from reprokit.render.fix_code import fix_code
from reprokit.render.kinds import words_of
from reprokit.rules.diagnosis import UNKNOWN, Diagnosis, TriedFix
from reprokit.rules.edits import clamp
from reprokit.rules.fix import TrialBudget, apply, attempt
from reprokit.rules.match import diagnose, matches, numbers_of
from reprokit.rules.rule import CONFIDENCES, TIERS, Fix
from reprokit.rules.scene import observe
from reprokit.rules.table import RULES
from reprokit.series.cause import TENTH, Cause, Intervention
from reprokit.series.story import StepNumbers
from tests.locate.mechanisms import (
    CASES,
    MISSES,
    NAN,
    half,
    mismatch,
    with_bystanders,
)
from tests.shrink.failing import INF, record, traced

BY_NAME = {rule.name: rule for rule in RULES}
WITH_FIXES = [rule.name for rule in RULES if rule.fixes]


@functools.cache
def diagnosis_of(name: str) -> Diagnosis:
    return diagnose(CASES[name](), write=fix_code)


def test_the_table_is_sound() -> None:
    assert len(BY_NAME) == len(RULES) >= 30
    assert set(MISSES) <= set(CASES) == set(BY_NAME)
    explained = {word for kind in (NonFinite, ExceptionRaised, Event, Dead, Unlearned) for word in kind.words}
    for rule in RULES:
        assert rule.confidence in CONFIDENCES and rule.tier in TIERS, rule.name
        assert {*rule.kinds.split()} <= explained, rule.name
        assert {*rule.phases.split()} <= {*Phase}, rule.name
        assert rule.cause in ("", "data", "setting", "state", "numerics", "framework"), rule.name


@pytest.mark.parametrize("name", CASES)
def test_every_rule_is_found(name: str) -> None:
    found = diagnosis_of(name)
    assert found.id == name
    assert found.confidence == BY_NAME[name].confidence
    assert len(found.evidence) == len(BY_NAME[name].seen) >= 1
    assert "{" not in found.mechanism + "".join(found.evidence)
    assert read(Diagnosis, plain_of(found)) == found


@pytest.mark.parametrize("name", WITH_FIXES)
def test_a_fix_is_reported_only_when_the_step_is_finite_with_it(name: str) -> None:
    fix = diagnosis_of(name).fix
    assert fix is not None and fix.helped, diagnosis_of(name).tried
    assert "not finite" not in fix.outcome
    assert ("finite" in fix.outcome) != (fix.outcome == "the call returns")
    assert len(fix.text) == len(fix.where) >= 1
    has_lines = any(call.site is not None for call in CASES[name]().program.calls)
    has_code = fix.id != "step_in" and (has_lines or fix.id in ("set_option",))
    assert bool(ast.parse(fix.code).body) is has_code


@pytest.mark.parametrize("name", CASES)
def test_evidence_is_what_the_failure_depends_on(name: str) -> None:
    snapshot = CASES[name]()
    alone, beside = matches(observe(snapshot)), matches(observe(with_bystanders(snapshot)))
    assert [(rule.name, numbers) for rule, numbers in alone] == [(rule.name, numbers) for rule, numbers in beside]


@pytest.mark.parametrize("name", MISSES)
def test_no_rule_is_found_in_its_near_miss(name: str) -> None:
    assert numbers_of(BY_NAME[name], observe(MISSES[name]())) is None


def test_a_fix_changes_nothing_but_what_it_says() -> None:
    snapshot = CASES["where-trap"]()
    (rule, _), *_ = matches(observe(snapshot))
    edited = apply(observe(snapshot), rule.fixes[0])
    assert edited is not None and edited.step.tensors == snapshot.tensors
    before, after = snapshot.program.calls, edited.step.program.calls
    assert [call.target for call in after if call.target in {item.target for item in before}] == [
        call.target for call in before
    ]
    assert locate(edited.step.program, edited.step.tensors) is None
    assert locate(snapshot.program, snapshot.tensors) is not None


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("log2", "torch.log2(x.clamp(min=1e-6))"),
        ("half-overflow", "F.linear(x.float(), "),
        ("half-overflow matmul", "x.float() @ "),
        ("huge-learning-rate", "torch.optim.SGD(params, lr=1e-3)"),
        ("optimizer-eps-lost", "torch.optim.Adam(params, eps=1e-4)"),
    ],
)
def test_the_code_of_a_fix_is_about_what_failed(name: str, code: str) -> None:
    wide = torch.full((1, 4), 300.0).half()
    others = {
        "log2": lambda: record(lambda x: torch.log2(x), x=torch.tensor([-1.0, 1.0])),
        "half-overflow matmul": lambda: record(lambda x: (x @ x.T).sum(), x=wide),
    }
    fix = diagnose((CASES | others)[name](), write=fix_code).fix
    assert fix is not None and code in fix.code


def test_a_failure_that_moves_on_is_fixed_by_a_second_change() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x.log() + (x - 1).sqrt()).sum()

    found = diagnose(record(step, x=torch.tensor([-1.0, 4.0])), write=fix_code)
    assert found.fix is not None and len(found.fix.text) == 2
    assert "x.clamp(min=1e-6).log() + (x - 1).clamp(min=1e-6).sqrt()" in found.fix.code
    assert "log" in found.fix.text[0] and "sqrt" in found.fix.text[1]


@pytest.mark.parametrize(
    ("step", "numbers", "name"),
    [
        (lambda x: (x.log() + (1 - x).log()).sum(), [0.0, 1.0, 0.5], "log-of-zero"),
        (lambda x: torch.stack([x[x > n].mean() for n in (0, 5, 9)]).sum(), [1.0, 2.0], "mean-of-nothing"),
    ],
)
def test_all_calls_of_one_line_are_changed_together(step: Any, numbers: list[float], name: str) -> None:
    found = diagnose(record(step, x=torch.tensor(numbers)))
    assert found.id == name and found.fix is not None and len(found.fix.text) == 1


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (lambda x: (q := x.exp()) / q.sum(), "exponentials-underflowed"),
        (lambda x: (q := x.exp().t()) / q.sum(0), "exponentials-underflowed"),
        (lambda x: (r := F.relu(-F.softmax(x, -1))) / r.sum(), "zero-by-zero"),  # zeros that were meant
        (lambda x: (q := x[x > 0].exp()).sum() / q.sum(), "zero-by-zero"),  # a sum of nothing
        (lambda x: (z := x - x).index_fill(1, torch.tensor([1]), INF) / (z + torch.eye(2)), "zero-by-zero"),
        (lambda x: (w := 1 / x.masked_fill(x < 0, INF)) / w.sum(), "zero-by-zero"),
        (lambda x: torch.log(1 - torch.sigmoid(-x)), "log-of-softmax"),
        (lambda x: torch.log(1 - torch.sigmoid(-x).view(-1)), "log-of-softmax"),
        (lambda x: torch.log(1 - torch.sigmoid(-x.half()).t().float()), "log-of-softmax"),
        (lambda x: torch.xlogy(x, x - x), "log-of-zero"),
        (lambda x: torch.multinomial(torch.softmax(x / (x - x), -1), 1), "division-by-zero"),
        (lambda x: (x - x.mean()) / x.std(), "standardise-constant"),
        (lambda x: (x - x.mean()) / x.var().sqrt(), "standardise-constant"),
    ],
)
def test_zeros_are_told_apart_by_what_made_them(step: Callable[..., torch.Tensor], name: str) -> None:
    assert diagnose(record(step, x=torch.full((2, 2), -200.0))).id == name


@pytest.mark.parametrize(
    "losses",
    [
        [-1.0, -4.0, -30.0, -200.0, -5e3, -2e4],  # a likelihood that improves
        [1e-3, 2e-4, 9e-4, 3e-4, 5e-4, 8e-3],  # a single bad batch
        [2.0, 1e-3, 1.5, 2e-2, 1.8, 1.9],  # noise
    ],
)
def test_training_that_goes_well_was_not_diverging(losses: list[float]) -> None:
    rows = [StepNumbers(n, loss, 1.0) for n, loss in enumerate(losses)]
    found = diagnose(replace(CASES["log-of-zero"](), timeline=rows))
    assert "learning-rate-divergence" not in [item.id for item in found.also]


def test_what_is_not_a_bad_value_has_no_diagnosis() -> None:
    found = diagnose(mismatch())
    assert found.id == UNKNOWN and not found.is_known and found.fix is None


def test_the_budget_bounds_the_tries() -> None:
    found = diagnose(CASES["log-of-zero"](), budget=TrialBudget(runs=0))
    assert found.id == "log-of-zero" and found.fix is None and found.tried == ()
    assert found.note is not None and "Time was up" in found.note


def test_shown_as_markdown_and_as_data() -> None:
    found = diagnosis_of("sqrt-gradient-at-zero")
    text = markdown(page(found))
    assert text.startswith("**The derivative of a square root at zero**")
    assert "A fix was tried on the captured step and helped: add a small number under the square root" in text
    assert "sqrt = (total + 1e-6).sqrt()" in text.split("```python\n")[1].split("```")[0]
    data = page(found)
    assert data["fix"]["helped"] and data["links"] == list(found.links)
    assert "The derivative of a square root" in one_line(found)


def test_rendering_redacts() -> None:
    secret = "ghp_" + "a1B2" * 9
    found = replace(diagnosis_of("log-of-zero"), evidence=(f"the input `{secret}` is zero",))
    assert secret not in markdown(page(found)) and secret not in str(page(found))


def test_an_entry_of_the_story_before_does_not_hide_the_origin() -> None:
    losses = [1.0, 3.0, 20.0, 300.0, 5e3]
    rows = [StepNumbers(n, loss, 1.0) for n, loss in enumerate(losses)]
    found = diagnose(replace(CASES["log-of-zero"](), timeline=rows))
    assert found.id == "log-of-zero"
    assert "learning-rate-divergence" in [item.id for item in found.also]


def test_a_fix_leaves_no_infinity_that_the_forward_pass_hides() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return 1 - x.sum() / (x + x).sum()  # finite / inf once the first sum is mended

    found = diagnose(record(step, x=torch.full((2,), 40000.0).half()))
    assert found.id == "half-overflow" and found.fix is not None and len(found.fix.text) > 1
    assert found.fix.helped and "finite" in found.fix.outcome


@pytest.mark.parametrize(("least", "helped"), [(1e-6, True), (4.0, False)])
def test_a_fix_that_takes_a_gradient_away_is_none(least: float, helped: bool) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.maximum(x.sqrt(), y).sum().backward()

    scene = observe(record(step, x=torch.zeros(1).requires_grad_(), y=torch.ones(1).requires_grad_()))
    fix = attempt(scene, Fix("clamp", clamp(min=least)), TrialBudget(), lambda scene: [])
    assert fix is not None and fix.helped is helped
    assert ("1 of 2 gradients became zero" in fix.outcome) is not helped


def test_a_fix_that_leaves_a_loss_out_of_all_proportion_says_so() -> None:
    def step(x: torch.Tensor) -> None:
        x.exp().sum().backward()

    snapshot = record(step, x=torch.tensor([200.0]).requires_grad_())
    outcomes = []
    for losses in ([2.0, 1.0, 3.0, NAN], [1e-7, 2e-7]):
        snapshot = replace(snapshot, timeline=[StepNumbers(number, loss) for number, loss in enumerate(losses)])
        fix = diagnose(snapshot).fix
        assert fix is not None and fix.helped and not fix.is_plausible
        outcomes.append(fix.outcome)
        found = diagnose(snapshot)
        assert "; made finite when tried, but not fixed: " in one_line(found) and "; fixed" not in one_line(found)
        assert "its loss is absurd, so it is no fix: clamp" in markdown(page(found)) and "and helped" not in markdown(
            page(found)
        )
        assert "it is no fix" in page(found)["fix"]["intro"] and not page(found)["fix"]["helped"]
    assert "(about 2 in the steps before)" in outcomes[0]
    absurd = diagnose(record(lambda x: (x * 1e30).sum().backward(), x=torch.tensor([1e30, 0.0]).requires_grad_())).fix
    assert absurd is not None and absurd.helped and not absurd.is_plausible and "before" not in absurd.outcome


@pytest.mark.parametrize(
    ("numbers", "loss", "losses", "is_plausible"),
    [
        ([-1.0, 500.0], "486.2", [0.04, 0.03, 0.05], False),
        ([-1.0, 500.0], "486.2", [0.04, 0.03, 200.0], False),  # exploded already in the step before
        ([-1.0, 500.0], "486.2", [0.04, 200.0, 0.03, 180.0], False),  # once of that size before
        ([-1.0, 500.0], "486.2", [-0.5, 0.6, -0.4, 180.0], False),
        ([-1.0, 500.0], "486.2", [150.0, 200.0, 170.0], True),  # less than three times the usual one
        ([-1.0, 500.0], "486.2", [150.0, 200.0, 160.0], False),
        ([-1.0, 500.0], "486.2", [0.3, 2e3, 9e3, 4e4], False),  # diverged before
        ([-1.0, 500.0], "486.2", [], True),
        ([-1.0, 0.0], "-13.82", [2.4, 2.3, 2.5, NAN], False),
        ([-1.0, 0.0], "-13.82", [6.4, -0.1, 2.5, NAN], True),  # of either sign before
        ([-1.0, 0.0], "-13.82", [20.0, 15.0, 16.0, NAN], True),  # a fall below zero by less than what the losses were
        ([-1.0, 0.0], "-13.82", [6.4, NAN], True),  # too few to tell
    ],
)
def test_the_loss_after_a_fix_is_compared_with_the_usual_ones(
    numbers: list[float], loss: str, losses: list[float], is_plausible: bool
) -> None:
    def step(x: torch.Tensor) -> None:
        (x[:1].log().sum() + x[1:].sum()).backward()

    snapshot = record(step, x=torch.tensor(numbers).requires_grad_())
    snapshot = replace(snapshot, timeline=[StepNumbers(number, loss) for number, loss in enumerate(losses)])
    fix = diagnose(snapshot).fix
    assert fix is not None and fix.helped and f"loss {loss}" in fix.outcome
    assert fix.is_plausible is is_plausible
    assert ("in the steps before" in fix.outcome) is not is_plausible


def test_an_overflow_that_float32_would_not_survive_is_not_one_of_half_precision() -> None:
    wide = torch.tensor([1e25], dtype=torch.bfloat16)
    found = diagnose(record(lambda x: x * x, x=wide))
    assert found.id == "overflow" and "half-overflow" not in [item.id for item in found.also]
    assert diagnose(record(lambda x: x * x, x=wide.float())).id == "overflow"
    assert diagnose(record(lambda x: x * x, x=half(300.0))).id == "half-overflow"
    assert diagnose(record(lambda x: x.exp(), x=half(12.0))).id == "half-overflow"
    gradient = diagnose(record(lambda x: (x * 1e30 * 1e30).sum().backward(), x=wide.div(1e55).requires_grad_()))
    assert gradient.id == "exploding-gradients"


@pytest.mark.parametrize(
    ("call", "tensors", "name"),
    [
        (lambda x, y: F.cross_entropy(x, y), [(12, 12), torch.arange(16)], "length-mismatch"),
        (lambda x, y: F.nll_loss(x, y), [(3, 2), torch.tensor([0, 5])], "length-mismatch"),
        (lambda x, y: F.cross_entropy(x, y), [(2, 3, 4), torch.full((2, 5), 9)], "length-mismatch"),
        (lambda x, y, w: F.cross_entropy(x, y, w), [(2, 3), torch.tensor([1, 3]), (4,)], UNKNOWN),
        (lambda x, y, w: F.cross_entropy(x, y, w), [(2, 3), torch.tensor([1, 3]), (3,)], "index-outside"),
        (lambda x, y: F.cross_entropy(x, y), [(3, 2), torch.full((2,), -100)], "length-mismatch"),
        (lambda x, y, w: F.embedding_bag(y, x, per_sample_weights=w), [(2, 3), torch.tensor([[7]]), (4,)], UNKNOWN),
        (lambda x, y: F.embedding(y, x, max_norm=1.0), [(2, 3), torch.tensor([7])], "index-outside"),
        (lambda x, y: F.one_hot(y, 3), [(), torch.tensor([0, 3])], "index-outside"),
        (lambda x, y: x.gather(1, y), [(2, 3), torch.full((4, 1), 5)], UNKNOWN),
        (lambda x, y: x.scatter(1, y, x), [(2, 3), torch.full((2, 9), 5)], UNKNOWN),
        (lambda x, y: F.ctc_loss(x, y, [9], [2]), [(2, 1, 3), torch.tensor([[1, 1]])], UNKNOWN),
        (lambda x, y: torch.linalg.solve(x, x[:1]), [(2, 2), torch.zeros(1)], UNKNOWN),
    ],
)
def test_an_exception_about_sizes_is_not_blamed_on_values(
    call: Callable[..., torch.Tensor], tensors: list[Any], name: str
) -> None:
    made = (torch.zeros(item) if isinstance(item, tuple) else item for item in tensors)
    assert diagnose(record(call, **dict(zip("xyw", made, strict=False)))).id == name


@pytest.mark.parametrize(
    ("backward", "call", "entry"),
    [
        (lambda grad, x: grad / (2 * x), "division", "division-by-zero"),
        (lambda grad, x: grad * x.log(), "log", "log-of-zero"),
        (lambda grad, x: grad * (100.0 - x).exp(), "exp", "exp-overflow"),
        (lambda grad, x: grad * (x / x.sum()), "division", "zero-by-zero"),
    ],
)
def test_a_call_in_a_custom_backward_is_no_derivative(
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], call: str, entry: str
) -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return backward(grad, *ctx.saved_tensors)

    def step(x: torch.Tensor) -> None:
        Custom.apply(x * x).sum().backward()

    snapshot = record(step, x=torch.tensor([0.0, 0.0]).requires_grad_())
    assert (snapshot.failure.phase, snapshot.failure.is_derivative) == ("backward", False)
    assert words_of(snapshot.failure).headline.startswith(f"{call} returns")
    assert words_of(snapshot.failure).phase == "in the backward of a custom autograd function"
    assert "derivative" not in expect(snapshot).expected + expect(snapshot).observed
    assert diagnose(snapshot).id == entry


def test_a_change_that_is_no_fix_is_not_said_to_have_done_nothing() -> None:
    found = diagnosis_of("log-of-zero")
    tried = TriedFix("clamp", ("clamp it",), "", ("",), True, "loss 1e9", is_plausible=False)
    text = markdown(page(replace(found, tried=(tried, replace(tried, text=("leave it",), helped=False)))))
    assert "- Made the step finite, but not its loss usual: clamp it (" in text
    assert "- Did not help: leave it (" in text


def test_rows_of_a_smaller_batch_are_not_where_an_event_begins() -> None:
    """Batches differ, and there is no healthy value to put in the place of one of another shape."""

    def step(size: int, largest: float, rate: float) -> Step:
        def compute(data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return (data[:size] * weight).sum()

        tensors = {"data": torch.ones(8) * largest, "weight": torch.tensor(rate)}
        made = traced(compute, **tensors)
        roles = {"data": "batch", "weight": "parameter"}
        inputs = tuple(replace(item, role=roles[item.name]) for item in made.program.inputs)
        return Step(replace(made.program, inputs=inputs), made.tensors)

    event = Predicate("loss", 3e4, 100.0, reference_step=3, began_at=4, usual=4.0)
    found = explained(step(3, 20.0, 500.0), step(4, 1.0, 1.0), Failure(Phase.FORWARD, "spike", event=event))
    assert found.call == "torch.Tensor.mul"


def test_no_smaller_learning_rate_is_advised_where_it_did_not_help() -> None:
    found = diagnosis_of("learning-rate-divergence")
    assert found.advice.startswith("Lower the learning rate, warm it up, or clip gradients")
    assert page(found)["advice"] == found.advice
    clipped = "A tenth of the learning rate did not help. Clip gradients ("
    for removes, advice in ((False, clipped), (True, found.advice)):
        cause = Cause("unknown", "The run diverged.", (), (Intervention(TENTH, removes),))
        assert page(found, cause)["advice"].startswith(advice)


def test_growth_names_the_range_of_learning_rates() -> None:
    snapshot = CASES["learning-rate-divergence"]()
    assert diagnose(snapshot).evidence[0].endswith(", at a learning rate of 0.1")
    rows = [replace(row, lr=rate) for row, rate in zip(snapshot.timeline, [0.1, 0.2, 9.9, 29.7] * 9, strict=False)]
    evidence = diagnose(replace(snapshot, timeline=rows)).evidence[0]
    assert re.search(r", at learning rates of 0\.[12] to 29\.7$", evidence), evidence
