"""What counts as the bug: every kind of check reduces its failure, guards against slipping, and renders a repro."""

from __future__ import annotations

import pickle
import runpy
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from reprokit.cli import main
from reprokit.compare.quantity import observed
from reprokit.errors import NotReproduced, UsageError
from reprokit.locate.failure import Failure, Predicate
from reprokit.program.ir import Call, Input, Mode, Phase, Program, Ref
from reprokit.program.step import Step
from reprokit.render.script import Script
from reprokit.render.sources import reduction_script
from reprokit.render.verify import verify
from reprokit.shrink import spec as specs
from reprokit.shrink.checks.check import Check, Ruling, Signed
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.checks.mismatch import Double, MismatchCheck
from reprokit.shrink.checks.recorded import ExceptionCheck, NonfiniteCheck
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import Reduction, load
from reprokit.snapshot.format import Snapshot, save
from tests.conftest import ForkingSystem, start_python_in
from tests.shrink import failing
from tests.shrink.failing import seeded, traced

INF, NAN = float("inf"), float("nan")
CHECKS = """
import torch

def exploded(outcome):
    return outcome.loss > 1e4

def lopsided(outcome):
    weight, bias = outcome.gradients["w"].norm(), outcome.gradients["b"].norm()
    return "same" if weight > 3 * bias else "passes"

def wrong_word(outcome):
    return "maybe"

def says_nothing(outcome):
    pass

def misspelt(outcome):
    return outcome.los > 1

def singular(outcome):
    return "singular" in str(outcome.exception)

number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "my_check.py"
    path.write_text(CHECKS)
    return path


@pytest.fixture
def beside(file: Path, tmp_path: Path) -> Path:
    """A folder of the test's own with the check in it, for scripts that run it."""
    return Path(shutil.copy(file, tmp_path)).parent


def error_of(script: Script, folder: Path, cure: tuple[str, str] | None = None) -> str:
    """How a repro ends, if need be with a change of its text that takes the bug away: its error, or nothing."""
    folder.mkdir(exist_ok=True)
    path = script.write(folder)
    if cure is not None:
        assert cure[0] in script.text, script.text
        path.write_text(script.text.replace(*cure))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_shows_the_bug(script: Script, folder: Path, words: str, cure: tuple[str, str]) -> None:
    """An error while the bug is there, and none once it is gone."""
    assert words in error_of(script, folder), script.text
    assert error_of(script, folder, cure) == ""


# -- exceptions ------------------------------------------------------------------------------------------------------


def changed_in_place(x: torch.Tensor, w: torch.Tensor) -> None:
    hidden = torch.tanh(F.linear(x, w))
    out = F.linear(hidden, w)
    hidden.add_(1.0)
    (torch.relu(out) + hidden).mean().backward()


def twice_backward(x: torch.Tensor) -> None:
    loss = (torch.exp(x) * 2).sum()
    loss.backward()
    loss.backward()


def out_of_range(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.embedding(i * 2 + 1, x)).sum()


def two_dtypes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.relu(x).half() * 1.0, w).sum()


EXCEPTIONS: list[tuple[Callable[..., Any], dict[str, torch.Tensor], int, str, tuple[str, str]]] = [
    (
        changed_in_place,
        {"x": seeded(5, 8), "w": seeded(8, 8, grad=True)},
        3,
        "modified by an inplace operation",
        (".add_(1.0)", ".add(1.0)"),
    ),
    (
        twice_backward,
        {"x": seeded(4, 3, grad=True)},
        1,
        "Trying to backward through the graph a second time",
        ("loss.backward()\nloss", "loss.backward(retain_graph=True)\nloss"),
    ),
    (out_of_range, {"x": seeded(10, 3), "i": torch.arange(9)}, 1, "index out of range in self", ("[1]", "[0]")),
    (two_dtypes, {"x": seeded(4, 3), "w": seeded(5, 3)}, 1, "same dtype", (", dtype=torch.float16", "")),
]


@pytest.mark.parametrize("case", EXCEPTIONS, ids=lambda case: case[0].__name__)
def test_an_exception_stays_the_same_exception(case: Any, tmp_path: Path) -> None:
    step, tensors, calls, words, cure = case
    snapshot = traced(step, **tensors)
    reduction = shrink(snapshot, check="exception")
    assert reduction.program.num_calls == calls
    assert reduction.signature.kind == "exception"
    assert reduction.failure.exception is not None and words in reduction.failure.exception[1]
    assert_shows_the_bug(reduction_script(reduction), tmp_path, words, cure)


def test_a_snapshot_of_an_exception_needs_no_word() -> None:
    assert isinstance(choose_check(None, failing.singular_matrix()), ExceptionCheck)
    assert isinstance(choose_check(None, failing.zero_by_zero()), NonfiniteCheck)
    assert shrink(failing.singular_matrix()).signature == shrink(failing.singular_matrix(), check="exception").signature


@pytest.mark.parametrize("check", ["exception", "mismatch:fp64"])
def test_a_check_that_does_not_fail_is_told(check: str) -> None:
    with pytest.raises(NotReproduced, match=f"`{check}` does not fail") as caught:
        shrink(traced(lambda x: (x * 2).sum(), x=seeded(3)), check=check)
    assert caught.value.hint is not None


# -- mismatches ------------------------------------------------------------------------------------------------------


def hilbert(size: int) -> torch.Tensor:
    numbers = torch.arange(1, size + 1)
    return 1.0 / (numbers[:, None] + numbers - 1)


def test_the_call_that_is_inexact_by_itself_is_blamed(tmp_path: Path) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.linalg.inv(x * 1.0) * 1e-6).sum()

    reduction = shrink(traced(step, x=hilbert(7)), check="mismatch:fp64")
    assert reduction.signature == Signed("forward", "mismatch", "torch.linalg.inv", check="mismatch:fp64")
    assert [call.name for call in reduction.program.calls] == ["inv"]
    assert_shows_the_bug(
        reduction_script(reduction), tmp_path, "not close", ("actual = step(x)", "actual = step(x.double()).float()")
    )


def cancelling(x: torch.Tensor) -> torch.Tensor:
    small = torch.sigmoid(x) * 2e-3
    return torch.log(1 - torch.exp(-small)).sum() * 1.0


def test_a_mismatch_that_no_single_call_shows_is_reduced_by_windows(tmp_path: Path) -> None:
    snapshot = traced(cancelling, x=seeded(4, 8))
    reduction = shrink(snapshot, check="mismatch:fp64")
    assert reduction.signature.call is None
    assert [call.name for call in reduction.program.calls] == ["exp", "__rsub__", "log"]
    assert sum(tensor.numel() for tensor in reduction.tensors.values()) == 1
    assert "the result differs from float64" in reduction_script(reduction).text
    cure = ("1 - torch.exp(x)", "-torch.expm1(x)")
    assert_shows_the_bug(reduction_script(reduction), tmp_path, "not close", cure)


def test_a_gradient_that_differs(tmp_path: Path) -> None:
    def step(x: torch.Tensor) -> None:
        torch.linalg.inv(x * 1.0).sum().backward()

    reduction = shrink(traced(step, x=hilbert(5).requires_grad_()), check="mismatch:fp64")
    script = reduction_script(reduction)
    assert "not close" in error_of(script, tmp_path), script.text


def test_random_calls_draw_the_same_in_both() -> None:
    rng = torch.get_rng_state()
    call = Call("torch.nn.functional.dropout", (Ref(0), 0.5, True), {}, Ref(9), mode=Mode(rng=Ref(1)))
    program = Program((call,), (Input(0, "x"), Input(1, "rng", "rng")), (Ref(9),))
    candidate = Step(program, {0: torch.ones(100), 1: rng})
    assert MismatchCheck(reference=Double()).observe(candidate) is None


def test_a_backend_that_does_not_work_is_told_in_one_line() -> None:
    with pytest.raises(UsageError, match="does not work on this machine") as caught:
        choose_check("mismatch:compile:no_such_backend", failing.zero_by_zero())
    assert "\n" not in caught.value.message and caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(failing.zero_by_zero(), "x.pt")
    assert main(["shrink", "--check", "mismatch:cpu-cuda", "x.pt"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert errors == ["reprokit: error: `mismatch:cpu-cuda` needs CUDA, and this torch sees none"]


# -- the user's function ---------------------------------------------------------------------------------------------


def growing(x: torch.Tensor, w: torch.Tensor) -> None:
    for _ in range(12):
        x = F.linear(torch.tanh(x) * 1.0 + x, w)
    (x**2).mean().backward()


def grown() -> Snapshot:
    return traced(growing, x=seeded(4, 8), w=seeded(8, 8, grad=True))


@pytest.fixture(scope="module")
def exploded(file: Path) -> Reduction:
    return shrink(grown(), check=f"{file}:exploded")


def test_growth_that_no_single_call_shows(exploded: Reduction, beside: Path) -> None:
    assert exploded.signature.check == "my_check.py:exploded"
    assert exploded.one_minimal
    assert 2 <= exploded.program.num_calls <= 6
    largest = max(float(tensor.abs().max()) for tensor in grown().tensors.values())
    assert exploded.summary()["max_abs_input"] <= largest
    script = reduction_script(exploded)
    assert script.files == ["repro.py", "my_check.py"]
    assert_shows_the_bug(script, beside, "exploded(outcome) is true", ("-2.7", "0.0"))


def test_gradients_by_name(file: Path, beside: Path) -> None:
    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> None:
        for _ in range(6):
            x = F.linear(x, w, b)
        (x**2).mean().backward()

    snapshot = traced(step, x=seeded(4, 8), w=seeded(8, 8, grad=True), b=seeded(8, grad=True))
    reduction = shrink(snapshot, check=f"{file}:lopsided", max_checks=40)
    assert {item.name for item in reduction.program.inputs if item.requires_grad} == {"w", "b"}
    assert "lopsided(outcome) is true" in error_of(reduction_script(reduction), beside)


def test_a_function_may_ask_for_an_exception(file: Path, beside: Path) -> None:
    reduction = shrink(failing.singular_matrix(), check=f"{file}:singular")
    assert reduction.program.num_calls == 1
    script = reduction_script(reduction)
    assert_shows_the_bug(script, beside, "singular(outcome) is true", ("torch.zeros(1, 1)", "torch.ones(1, 1)"))


@pytest.mark.parametrize("name", ["wrong_word", "says_nothing", "misspelt", "number"])
def test_a_function_that_has_no_verdict_is_one_clear_error(name: str, file: Path) -> None:
    with pytest.raises(UsageError, match=f"`my_check.py:{name}` has no verdict") as caught:
        shrink(traced(growing, x=seeded(2, 3), w=seeded(3, 3, grad=True)), check=f"{file}:{name}")
    assert caught.value.hint is not None and ".gradients" in caught.value.hint


def test_a_repro_that_runs_a_file_is_verified_beside_it_only(exploded: Reduction, tmp_path: Path) -> None:
    exploded.save(tmp_path / "reduction.pt")
    with pytest.raises(UsageError, match=r"runs the check in `my_check\.py`"):
        verify(tmp_path / "reduction.pt", 1)


def test_the_command_copies_the_check_beside_its_repro(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    save(grown(), "x.pt")
    assert main(["shrink", "-o", "out", "--max-checks", "5", "--check", "my_check.py:exploded", "x.pt"]) == 0
    assert "verification has not run yet -> out/repro.py" in capsys.readouterr().err
    assert Path("out", "my_check.py").read_text() == CHECKS
    assert verify(Path("out", "repro.py"), 1).fails


# -- guards ----------------------------------------------------------------------------------------------------------


def one_call(target: str) -> Program:
    return Program((Call(target, (Ref(0),), {}, Ref(9)),), (Input(0, "x"),), (Ref(9),))


def settled(text: str, snapshot: Snapshot) -> tuple[Check, Step, Failure]:
    whole = Step.of(snapshot)
    check = choose_check(text, snapshot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check.observe(whole)
    assert found is not None
    return (check if check.wanted is not None else check.adopted(found, whole)), whole, found


def snapshots(file: Path) -> list[tuple[str, Snapshot]]:
    return [
        ("nonfinite", failing.zero_by_zero()),
        ("exception", failing.singular_matrix()),
        ("mismatch:fp64", traced(cancelling, x=seeded(4, 8))),
        (f"{file}:exploded", grown()),
    ]


@pytest.mark.parametrize("place", range(4))
def test_every_check_guards_against_slipping(place: int, file: Path) -> None:
    text, snapshot = snapshots(file)[place]
    check, whole, found = settled(text, snapshot)
    assert check.allows(whole) and check.judge(found) is Ruling.SAME
    value = next(item.value for item in whole.program.inputs if whole.tensors[item.value].is_floating_point())
    for number in (NAN, INF, -INF) if text != "nonfinite" else (NAN,):
        assert not check.allows(whole.with_tensors({value: torch.full_like(whole.tensors[value], number)}))
    crash = Failure("forward", "exception", call="torch.relu", call_index=0, exception=("RuntimeError", "boom"))
    assert check.judge(crash) is not Ruling.SAME
    assert check.judge(None) is Ruling.PASSES
    assert pickle.loads(pickle.dumps(check)) == check


def test_a_function_is_not_shown_results_that_were_given(file: Path) -> None:
    check, _, _ = settled(f"{file}:exploded", grown())
    given = Program((Call("torch.relu", (Ref(0),), {}, Ref(9)),), (Input(0, "x"),), (Ref(0),))
    assert not check.allows(Step(given, {0: torch.ones(1)}))
    assert not check.allows(Step(one_call("torch.relu"), {0: torch.tensor(1e5)}))  # larger than anything given
    assert check.allows(Step(one_call("torch.relu"), {0: torch.tensor(1.0)}))


def test_both_infinities_are_forbidden_unless_the_snapshot_has_one() -> None:
    big = torch.full((3,), 200.0)
    check, _, _ = settled("nonfinite", traced(lambda x: torch.exp(x * 1.0).sum(), x=big))
    for number in (INF, -INF):
        assert not check.allows(Step(one_call("torch.abs"), {0: torch.tensor([number])}))
    masked = torch.tensor([1.0, 200.0, -INF])
    check, _, _ = settled("nonfinite", traced(lambda x: torch.exp(x * 1.0).sum(), x=masked))
    assert not check.allows(Step(one_call("torch.abs"), {0: torch.tensor([INF])}))
    assert check.allows(Step(one_call("torch.abs"), {0: torch.tensor([-INF])}))


# -- what may be written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "nan", "nonfinite:x", "mismatch", "mismatch:fp32", "mismatch:fp64:x", "check.py", "check.py:", "no.py:check"],
)
def test_specs_that_mean_nothing(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["shrink", "--check", text, "x.pt"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("reprokit: error: ") and lines[1].startswith("hint: ") and len(lines) == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.py", "def f(:", "not valid Python"),
        ("c.py", "x = 1", "has no function `f`"),
        ("repro.py", "", "of a result"),
    ],
)
def test_files_that_hold_no_check(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=words) as caught:
        specs.parse(f"{tmp_path / name}:f")
    assert caught.value.hint


# -- the same bytes --------------------------------------------------------------------------------------------------

EVERY_CHECK = """
import sys
from pathlib import Path
from reprokit.render.texts import render_all
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import load

made = []
for number, check in enumerate(sys.argv[3:]):
    snapshot, out = load(f"{number}.pt"), Path(sys.argv[1], str(number))
    out.mkdir(parents=True)
    made.append((shrink(snapshot, check=check, out_dir=out, max_checks=8), snapshot, out))
sys.executable = sys.argv[2]  # of the repro's runs
for reduction, snapshot, out in made:
    render_all(reduction, snapshot, out, times=1)
"""


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    cases = [
        ("nonfinite", failing.masked_softmax()),
        ("mismatch:fp64", traced(cancelling, x=seeded(4, 8))),
    ]
    for number, (_, snapshot) in enumerate(cases):
        save(snapshot, tmp_path / f"{number}.pt")
    found = []
    for seed in ("1", "2"):
        words = ("-c", EVERY_CHECK, f"out{seed}", ForkingSystem().executable, *(check for check, _ in cases))
        done = start_python_in(tmp_path, *words, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        for number in range(len(cases)):
            out = tmp_path / f"out{seed}" / str(number)
            found.append([(out / name).read_bytes() for name in ("repro.py", "issue.md", "test_repro.py")])
            found[-1].append(bytes_without_times(out / "reduction.pt"))
    assert found[: len(cases)] == found[len(cases) :]


def bytes_without_times(path: Path) -> bytes:
    reduction: Reduction = replace(load(path), seconds=0.0)
    if reduction.context is not None:
        reduction = replace(reduction, context=replace(reduction.context, seconds=0.0))
    reduction.save(path)
    return path.read_bytes()


@pytest.mark.parametrize("check", [None, "exception"])
@pytest.mark.parametrize(
    "words",
    [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes. Error code 12",
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB",
        "Invalid buffer size: 3.00 TiB",
    ],
)
def test_a_refused_allocation_is_not_reduced(words: str, check: str | None) -> None:
    snapshot = failing.wrong_shapes()
    refused = replace(snapshot.failure, exception=("RuntimeError", words))
    with pytest.raises(NotReproduced, match="out of memory depends on the machine; not reduced"):
        shrink(replace(snapshot, failure=refused), check=check)


def test_nan_is_no_spike() -> None:
    """The mean of no rows at all is above no threshold."""
    snapshot = traced(lambda x: x.mean(), x=torch.tensor([1e6, 2e6]))
    program, tensors = snapshot.program, snapshot.tensors
    event = Predicate("loss", 1.5e6, 10.0, 3, 4, usual=1.0)
    failure = Failure(Phase.FORWARD, "spike", event=event)
    found, _ = observed(program, tensors, failure)
    assert found is not None and found.event is not None and found.event.value == 1.5e6
    empty = {value: tensor[:0] for value, tensor in tensors.items()}
    assert observed(program, empty, failure)[0] is None
