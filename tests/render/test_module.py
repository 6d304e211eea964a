"""Context repros: real Python that fails by itself, with modules named and built as in the user's code."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprokit.render.module import MAX_LINES, ModuleScript, write_module_script
from reprokit.render.texts import piece_of, verified_piece, write_piece
from reprokit.render.verify import verify
from reprokit.shrink.context.finder import Context
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot
from tests.shrink import models
from tests.shrink.test_context import CASES, context_of, found_for


def script_of(step: Callable[[], Snapshot]) -> ModuleScript:
    found = write_module_script(found_for(step))
    assert found is not None
    return found


@pytest.mark.parametrize("step", CASES)
def test_a_context_repro_fails_by_itself(step: Callable[[], Snapshot], tmp_path: Path) -> None:
    script = script_of(step)
    result = verify(script.write(tmp_path), 1)
    assert result.fails
    assert ("RuntimeError" if found_for(step).failure.kind == "exception" else "AssertionError") in result.signature
    assert script.num_lines <= MAX_LINES
    text = script.text
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert not any(re.fullmatch(r"v\d+", name) for name in names)
    assert "reprokit" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
    assert max(map(len, text.splitlines())) <= 120
    assert not text.endswith("\n\n")
    used = text.split("from torch import nn\n")[-1]
    assert ("from torch import nn\n" in text) == ("nn." in used.replace("torch.nn.", ""))


NOT_ORDINARY = "# Some inputs or parameters are not ordinary numbers"


@pytest.mark.parametrize(
    ("step", "held", "absent"),
    [
        (models.masked_attention, ["class MaskedAttention(nn.Module):", "model = MaskedAttention()"], [NOT_ORDINARY]),
        (models.masked_attention, ["self.query = nn.Linear(", "scores = scores.masked_fill("], []),
        (
            models.torch_attention,
            ["torch.manual_seed(0)", "nn.MultiheadAttention(8, 2, batch_first=True)"],
            ["nn.init"],
        ),
        (models.log_gradient, ["self.weight = nn.Parameter(", "assert not torch.isnan(model.weight.grad)"], []),
        (models.huge_input, [NOT_ORDINARY], []),
        (models.distances_within, ["def distances(z):", "distances(z)."], ["loss"]),
        (models.constant_batch, ["def centred(x):"], ["nn."]),
        (models.convolutional, ["self.body = nn.Sequential(", "nn.Conv2d(", "nn.BatchNorm2d("], []),
        (models.looked_up_pair, ["nn.Embedding(", "[0] = 49", ".pow(2)"], []),
    ],
)
def test_names_are_those_of_the_users_code(step: Callable[[], Snapshot], held: list[str], absent: list[str]) -> None:
    text = script_of(step).text
    assert all(words in text for words in held) and not any(words in text for words in absent)


def test_a_variable_does_not_hide_the_function_that_is_called_again() -> None:
    snapshot = models.function_called_twice()
    script = write_module_script(Context(snapshot.program, snapshot.tensors, snapshot.failure))
    assert script is not None
    with pytest.raises(AssertionError, match="is inf"), contextlib.redirect_stdout(io.StringIO()):
        exec(script.text, {})


def test_what_needs_a_side_file_is_not_printed() -> None:
    snapshot = models.growing()  # its weights are neither short nor what the layers start with
    assert write_module_script(Context(snapshot.program, snapshot.tensors, snapshot.failure)) is None


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (nn.Embedding(4, 3), torch.tensor([1, 7])),
        (nn.BatchNorm1d(3), torch.ones(1, 3)),
        (nn.Conv1d(2, 4, 3), torch.ones(1, 5, 9)),
        (nn.Linear(4, 3), torch.ones(2, 5)),
    ],
)
def test_a_layer_that_raises_is_shown_as_that_layer(layer: nn.Module, batch: torch.Tensor) -> None:
    model = nn.Sequential(nn.Identity(), layer)
    script = write_module_script(context_of(models.record_model(model, lambda x: model(x), x=batch)))
    assert script is not None and f" = nn.{type(layer).__name__}(" in script.text


@pytest.fixture(scope="module")
def reduction() -> Reduction:
    return shrink(models.masked_attention())


def written(reduction: Reduction, folder: Path, times: int = 1) -> dict[str, Any] | str:
    """What `render_all` says of the piece of the model, or the reason why there is none."""
    found = verified_piece(piece_of(reduction, None), times)
    return found if isinstance(found, str) else write_piece(found, reduction, folder)


def test_a_context_that_is_missing_or_does_not_fail_leaves_no_file(reduction: Reduction, tmp_path: Path) -> None:
    assert reduction.context is not None
    tensors = {v: torch.zeros_like(t) for v, t in reduction.context.tensors.items()}
    for context in (None, replace(reduction.context, tensors=tensors)):
        assert isinstance(written(replace(reduction, context=context), tmp_path), str)
        assert list(tmp_path.iterdir()) == []


def test_a_context_is_written_and_verified(reduction: Reduction, tmp_path: Path) -> None:
    summary = written(reduction, tmp_path, times=2)
    assert isinstance(summary, dict)
    assert summary["verified"] == "2/2"
    assert summary["modules"] == 1
    assert Path(summary["path"]).read_text().count("class ") == 1


class Tied(nn.Module):
    """A layer that is called with the weight of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(3, 1)
        self.score = nn.Linear(3, 2)
        nn.init.constant_(self.words.weight, 10.0)
        nn.init.constant_(self.score.weight, 10.0)

    def forward(self) -> torch.Tensor:
        return torch.exp(self.score(self.words.weight))


def test_a_parameter_that_a_layer_is_called_with_belongs_to_the_module_around_it(tmp_path: Path) -> None:
    model = Tied()
    context = shrink(models.record_model(model, model)).context
    assert context is not None
    script = write_module_script(context)
    assert script is not None and "class Tied(nn.Module)" in script.text
    assert verify(script.write(tmp_path), 1).fails


class Growth(nn.Module):
    """The exponential of a sum; no line names what is added."""

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        z = torch.add(*given)
        return torch.exp(z)


@torch.no_grad()
def test_an_input_without_a_name_has_one_name_in_a_module_and_where_it_is_called() -> None:
    growth = Growth()

    def step(x: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        x = x * 2
        return growth(list(given.values())) - x

    snapshot = models.record_model(
        growth, step, x=torch.ones(2), input_1=torch.full((2,), 90.0), input_2=torch.ones(2)
    )  # fmt: skip
    script = write_module_script(Context(snapshot.program, snapshot.tensors, snapshot.failure))
    assert script is not None
    expected = ("def forward(self, y, w):", "torch.add(y, w)", "model(y, w) - x", "x = x * 2")
    assert [text for text in expected if text not in script.text] == []


def test_a_context_that_is_the_minimum_again_is_not_written(tmp_path: Path) -> None:
    def step(gradient: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return gradient / size

    small = shrink(models.record_model(nn.Module(), step, gradient=torch.zeros(4, 3), size=torch.zeros(4, 3)))
    assert small.context is not None and small.program.num_calls == 1
    assert written(small, tmp_path) == "it would be `repro.py` again"


def test_a_piece_that_fails_in_another_way_is_left_out(tmp_path: Path) -> None:
    """The deviation of nothing at all where the minimum has that of one element."""

    class Spread(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.std(x)

    spread = Spread()
    with warnings.catch_warnings(action="ignore"):  # torch warns of both
        one, empty = (models.record_model(spread, spread, x=torch.ones(size)) for size in (1, 0))
        small = shrink(one)
    context = Context(empty.program, empty.tensors, empty.failure)
    said = written(replace(small, context=context), tmp_path)
    assert said == "the part of the model that was found fails in another way than `repro.py`"
    assert list(tmp_path.iterdir()) == []
