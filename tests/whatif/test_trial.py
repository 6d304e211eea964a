"""Single trials: which answer a variant gets, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from reprokit.errors import UsageError
from reprokit.locate.failure import Failure
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.step import Step
from reprokit.shrink.checks.mismatch import MismatchCheck
from reprokit.snapshot.format import Snapshot
from reprokit.whatif import BY_KEY, VARIANTS, Answer, Trial, check_of, trial_of
from tests.shrink import failing

Make = Callable[[], Snapshot]
SAME, OTHER, PASSES, CANNOT_RUN = Answer.SAME, Answer.OTHER, Answer.PASSES, Answer.CANNOT_RUN


def trial_in(snapshot: Snapshot, variant: str) -> Trial:
    """What becomes of a snapshot's program."""
    whole = Step.of(snapshot)
    check = check_of(whole, snapshot.failure, None, None)
    return trial_of(whole, check, variant)


def autocast_overflow() -> Snapshot:
    """A product that overflows in the float16 of autocast alone."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return x @ y

    return failing.record(step, x=torch.full((2, 2), 300.0), y=torch.full((2, 2), 300.0))


def overflow_of_exp() -> Snapshot:
    """An infinity in float32 and below."""
    return failing.record(lambda x: torch.exp(x) * 0.5, x=torch.full((3,), 100.0))


def large_logarithm() -> Snapshot:
    """A NaN whose operand does not fit into float16."""
    return failing.record(lambda x: torch.log(x), x=torch.tensor([-1e6]))


def attention_overflow() -> Snapshot:
    """A NaN in an attention whose scores overflow."""
    q = torch.full((1, 1, 4, 8), 1e25)
    return failing.record(lambda x: F.scaled_dot_product_attention(x, x, x).sum(), x=q)


def test_attention_kernels_are_tried_where_there_is_attention() -> None:
    def keys(snapshot: Snapshot) -> set[str]:
        candidate = Step.of(snapshot)
        return {variant.key for variant in VARIANTS if variant.is_of_interest(candidate)}

    assert keys(attention_overflow()) - keys(failing.masked_softmax()) == {
        "attention:math", "attention:flash", "attention:efficient",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "variant", "answer"),
    [
        (attention_overflow, "attention:flash", SAME),
        (attention_overflow, "attention:efficient", CANNOT_RUN),
        (failing.masked_softmax, "as_it_is", SAME),
        (failing.masked_softmax, "float64", SAME),
        (failing.masked_softmax, "one_thread", SAME),
        (failing.masked_softmax, "deterministic", SAME),
        (failing.half_linear_overflow, "float16", SAME),
        (failing.half_linear_overflow, "float32", PASSES),
        (failing.half_linear_overflow, "bfloat16", PASSES),
        (failing.sqrt_gradient, "float64", SAME),
        (failing.adam_half, "float32", PASSES),
        (failing.adam_half, "as_it_is", SAME),
        (failing.wrong_shapes, "float64", SAME),
        (failing.singular_matrix, "float16", CANNOT_RUN),
        (autocast_overflow, "as_it_is", SAME),
        (autocast_overflow, "autocast_off", PASSES),
        (autocast_overflow, "float32", PASSES),
        (overflow_of_exp, "float32", SAME),
        (overflow_of_exp, "float64", PASSES),
        (large_logarithm, "float64", SAME),
        (large_logarithm, "float16", OTHER),
        (failing.eigh_gradient, "bfloat16", CANNOT_RUN),
    ],
)
def test_answers(make: Make, variant: str, answer: Answer) -> None:
    trial = trial_in(make(), variant)
    assert trial.answer is answer, trial
    assert (trial.seconds is None) == (answer is CANNOT_RUN)
    if answer in (OTHER, CANNOT_RUN):
        reason = {large_logarithm: "`x`", failing.eigh_gradient: "not implemented"}.get(make, "")
        assert trial.detail and "\n" not in trial.detail and reason in trial.detail


def test_anomaly_mode_is_quoted() -> None:
    trial = trial_in(failing.sqrt_gradient(), "detect_anomaly")
    assert trial.answer is SAME
    assert "Backward0' returned nan values" in trial.detail


def test_anomaly_mode_runs_the_backward_pass_of_a_step_that_has_none() -> None:
    trained = failing.record(lambda x: x.sqrt().sum(), x=torch.tensor([-1.0], requires_grad=True))
    trial = trial_in(trained, "detect_anomaly")
    assert trial.answer is SAME and "'SqrtBackward0' returned nan values" in trial.detail
    without = trial_in(failing.record(lambda x: x.sqrt().sum(), x=torch.tensor([-1.0])), "detect_anomaly")
    assert without.answer is SAME and "reports nothing in the captured step" in without.detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_other_device_is_missing() -> None:
    assert trial_in(failing.masked_softmax(), "cuda") == Trial(CANNOT_RUN, "torch sees no GPU")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_other_device() -> None:
    assert trial_in(failing.masked_softmax(), "cuda").answer is SAME


@pytest.mark.parametrize("make", [failing.masked_softmax, failing.sqrt_gradient, failing.wrong_shapes])
def test_compiled(make: Make) -> None:
    trial = trial_in(make(), "compile:aot_eager")
    assert trial.answer is SAME, trial


def test_a_compiler_that_does_not_exist_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_KEY, "compile:none", replace(BY_KEY["compile:aot_eager"], backend="no_such_backend"))
    trial = trial_in(failing.masked_softmax(), "compile:none")
    assert trial.answer is CANNOT_RUN
    assert "no_such_backend" in trial.detail


def test_a_comparison_is_not_compiled() -> None:
    call = Call("torch.exp", (Ref(0),), {}, Ref(1))
    whole = Step(Program((call,), (Input(0, "x"),), (Ref(1),)), {0: torch.ones(2)})
    failure = Failure("forward", "mismatch", "fp64", "torch.exp", 0, value=1)
    check = MismatchCheck().adopted(failure, whole)
    trial = trial_of(whole, check, "compile:aot_eager")
    assert (trial.answer, trial.detail) == (
        CANNOT_RUN,
        "`mismatch:fp64` is not a failure that a compiled program is checked for",
    )


def test_settings_of_torch_are_given_back() -> None:
    def settings() -> tuple[object, ...]:
        return (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
        )

    before = settings()
    for variant in VARIANTS:
        if not variant.is_slow:
            trial_in(failing.masked_softmax(), variant.key)
    assert settings() == before


def test_code_of_a_users_is_not_run_because_a_file_names_it() -> None:
    snapshot = failing.masked_softmax()
    failure = Failure("forward", "function", "mine.py:is_bad")
    with pytest.raises(UsageError, match="check of your own"):
        check_of(Step.of(snapshot), failure, "mine.py:is_bad", None)
