"""Names of tensors: arguments as their call is written, and the items of a user's dicts."""

import sys
from pathlib import Path
from typing import Any

import torch

from reprokit.capture.calls import Root
from reprokit.capture.tape import Number, Op
from reprokit.capture.tensor_names import Names
from reprokit.program.ir import Mode

SOURCE = """
criterion(model(x, other[0]), y)
model(
    images,
    option=3,
)
model(x) + model(y)
model(*args)
"""


def test_arguments_are_named_where_they_are_variables(tmp_path: Path) -> None:
    found: list[str | None] = []

    def model(*given: torch.Tensor, option: int = 0) -> torch.Tensor:
        frame, names = sys._getframe(1), Names({})
        numbers = tuple(map(Number, range(len(given))))
        root = torch.nn.Identity()
        names.add_by_source(Op(Root, root, numbers, {}, (), frame.f_code, frame.f_lasti, Mode(), None))
        described = [names.describe(number, tensor) for number, tensor in zip(numbers, given, strict=True)]
        found.extend(origin.name if origin is not None else None for origin in described)
        return torch.ones(1)

    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    variables: dict[str, Any] = {name: torch.ones(1) for name in ("x", "y", "images")}
    rest = {"other": [torch.ones(1)], "args": [torch.ones(1), torch.ones(1)], "model": model, "criterion": model}
    exec(compile(SOURCE, str(script), "exec"), {**variables, **rest})
    assert found == ["x", None, None, "y", "images", "x", "y", None, None]
