"""The repro script: it shows the failure, checks for it in the way that failed, and says so in its header."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from reprokit.errors import NotReproduced
from reprokit.locate.blame import locate
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.render.script import Script, write_script
from tests.render.programs import (
    Case,
    failing_cholesky,
    half_precision_adam,
    masked_softmax,
    one_call,
    square_root_at_zero,
)


def script_of(case: Case) -> Script:
    failure = locate(*case)
    assert failure is not None
    return write_script(*case, failure, num_calls_before=70)


def run_script(script: Script, folder: Path) -> BaseException | None:
    """What a script raises; that Python ends with exit code 1 then is what `test_bisect` is about."""
    try:
        runpy.run_path(str(script.write(folder)), run_name="__main__")
    except Exception as error:
        return error
    return None


def overflow() -> Case:
    half = torch.full((1, 1), 300.0).half()
    return one_call("torch.nn.functional.linear", Ref(0), Ref(1), tensors={0: half, 1: half})


def mixed_infinities() -> Case:
    return one_call("torch.Tensor.mul", Ref(0), 2.0, tensors={0: torch.tensor([3e38, float("-inf")])})


@pytest.mark.parametrize(
    ("case", "assertion", "printed"),
    [
        (masked_softmax(), 'assert not torch.isnan(out).any(), "F.softmax(x, dim=0) is nan"', "out = tensor([nan])\n"),
        (
            square_root_at_zero(),
            'assert not torch.isinf(distance.grad).any(), "distance.grad is inf"',
            "distance.grad = tensor([inf])\n",
        ),
        (
            half_precision_adam(),
            'assert not torch.isnan(weight).any(), "after Adam.step(), weight is nan"',
            "weight = tensor([nan], dtype=torch.float16)\n",
        ),
        (
            overflow(),
            'assert not torch.isinf(out).any(), "F.linear(x, weight) is inf"',
            "out = tensor([[inf]], dtype=torch.float16)\n",
        ),
        (
            mixed_infinities(),
            'assert not torch.isposinf(out).any(), "x * 2.0 contains inf"',
            "out = tensor([inf, -inf])\n",
        ),
    ],
)
def test_ends_with_a_plain_check(
    tmp_path: Path, case: Case, assertion: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of(case)
    assert script.text.splitlines()[-1] == assertion
    assert isinstance(run_script(script, tmp_path), AssertionError)
    assert capsys.readouterr().out == printed
    assert script.num_lines <= 10
    assert script.files == ["repro.py"]


def test_an_exception_is_left_to_itself(tmp_path: Path) -> None:
    script = script_of(failing_cholesky())
    assert "assert" not in script.text
    assert isinstance(run_script(script, tmp_path), torch.linalg.LinAlgError)


def test_a_gradient_that_changes_its_way_is_still_found() -> None:
    calls = (
        Call("torch.sigmoid", (Ref(0),), {}, Ref(1)),
        Call("torch.Tensor.__rsub__", (Ref(1), 1), {}, Ref(2)),
        Call("torch.Tensor.__pow__", (Ref(2), 0.5), {}, Ref(3)),
        Call("torch.Tensor.backward", (Ref(3),), phase="backward"),
    )
    program = Program(calls, (Input(0, "logit", requires_grad=True),))
    script = script_of((program, {0: torch.tensor(100.0)}))
    assert script.text.splitlines()[-1] == 'assert not torch.isnan(logit.grad).any(), "logit.grad is nan"'


def test_a_program_that_works_has_no_repro() -> None:
    program, tensors = masked_softmax()
    failure = locate(program, tensors)
    assert failure is not None
    with pytest.raises(NotReproduced):
        write_script(program, {0: torch.zeros(1)}, failure)


def test_an_input_that_was_bad_already_is_shown_by_what_it_leads_to() -> None:
    script = script_of(one_call("torch.Tensor.mul", Ref(0), 2.0, tensors={0: torch.tensor([float("nan")])}))
    assert script.text.splitlines()[0].startswith("# input is nan before the first call")
    assert script.text.splitlines()[-1] == 'assert not torch.isnan(out).any(), "x * 2.0 is nan"'
