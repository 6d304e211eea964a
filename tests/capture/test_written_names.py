"""Names of arguments where a call is written, and of the items of a user's dicts."""

from pathlib import Path

import pytest
import torch

from reprokit.capture.record.tensor_names import Names
from reprokit.capture.record.written_names import argument_names

SOURCE = """
loss = criterion(model(x, other[0]), y)
logits = model(
    images,
    option=3,
)
a = model(x) + model(y)
b = model(*args)
"""


@pytest.mark.parametrize(
    ("line", "num_args", "keywords", "names"),
    [
        (2, 2, (), []),  # two calls of two arguments
        (3, 1, ("option",), ["images"]),
        (4, 1, ("option",), ["images"]),
        (3, 1, (), []),
        (7, 1, (), []),
        (8, 1, (), []),
        (99, 1, (), []),
    ],
)
def test_only_what_is_certain(
    line: int, num_args: int, keywords: tuple[str, ...], names: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    assert argument_names(str(script), line, num_args, frozenset(keywords)) == names


@pytest.mark.parametrize("content", ["def (", "\0", None])
def test_what_is_not_source(content: str | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    if content is not None:
        script.write_text(content)
    assert argument_names(str(script), 1, 1, frozenset()) == []


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("grads", "_grad"), ("gradients", "_grad"), ("inner_grads", "_grad"), ("params", ""), ("graduates", "")],
)
def test_items_of_dicts_of_gradients_are_no_parameters(name: str, suffix: str) -> None:
    tensor, names = torch.ones(1), Names()
    names._add_values(name, {"fc.weight": tensor})
    origin = names.describe(tensor)
    assert origin is not None and origin.name == f"fc.weight{suffix}"
