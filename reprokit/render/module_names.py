"""Names inside a context repro: attributes for children of a module, classes, and paths such as ``model.fc.weight``."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from reprokit.program.ir import Call
from reprokit.render.names import identifier, name_for_input, numbered
from reprokit.shrink.context.piece import modules_in_order, own_values
from reprokit.shrink.context.step import is_container
from reprokit.shrink.context.tree import ROOT, Block, Key, Tree

_RESERVED = frozenset({"torch", "nn", "F", "Module", "Path", *dir(builtins)})


@dataclass
class ModuleNames:
    """The names of modules and of the parameters in them.

    ``attributes`` holds for each module its name in its parent; in the script it is a variable. In a chain it is the
    number of the place. ``own`` holds the names of parameters by value.
    """

    tree: Tree
    parents: dict[Key, Key] = field(default_factory=dict)
    attributes: dict[Key, str] = field(default_factory=dict)
    own: dict[int, str] = field(default_factory=dict)
    layer_of: dict[int, Key] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = {ROOT_KEY: self.tree.root, **{block.key: block for block in modules_in_order(self.tree.root)}}
        for key, block in blocks.items():
            children = list(dict.fromkeys(item.key for item in block.items if _is_module(item)))
            self.parents.update(dict.fromkeys(children, key))
            taken = self._name_own(key) if key != ROOT_KEY and block.layer is None else set()
            self.attributes.update(_names_of(block, children, taken))
            if block.layer is not None:
                self.own.update({value: name for name, value in block.layer.state.items()})
                self.layer_of.update(dict.fromkeys(block.layer.state.values(), key))

    def module_path(self, key: Key, inside: Key) -> str | None:
        """The path of a module from the forward of another one (or from the script); ``None`` from elsewhere."""
        steps: list[str] = []
        if key[0].endswith("()"):
            return function_name(key[1])
        while key != inside:
            if key not in self.parents:
                return None
            name = self.attributes[key]
            steps.insert(0, name if name.startswith("[") else f".{name}")
            key = self.parents[key]
        path = "".join(steps)
        return path.removeprefix(".") if inside == ROOT_KEY else f"self{path}"

    def value_path(self, value: int, inside: Key) -> str | None:
        """The same for a parameter or buffer."""
        owner = self.layer_of.get(value) or self.tree.owners.get(value)
        path = self.module_path(owner, inside) if owner is not None else None
        return f"{path}.{self.own[value]}" if path is not None else None

    def _name_own(self, key: Key) -> set[str]:
        taken: set[str] = set()
        for value in own_values(self.tree, key):
            base = name_for_input(self.tree.program.input(value), self.tree.program)
            name = _unique(base, taken)
            taken.add(name)
            self.own[value] = name
        return taken


ROOT_KEY: Key = (ROOT.path, ROOT.cls)


def class_name(cls: str) -> str:
    """A class's name as it may stand in Python."""
    return _as_word(cls, "Piece", "Module")


def function_name(name: str) -> str:
    """A function's name as it may stand in Python."""
    return _as_word(name, "piece", "_")


def _as_word(text: str, instead: str, ending: str) -> str:
    """An identifier that is no keyword, nothing of Python's or torch's own, and does not begin with two underscores."""
    last = re.sub(r"\W", "_", text.rpartition(".")[2], flags=re.ASCII)
    word = last.strip("_") if last.startswith("__") else last
    is_taken = keyword.iskeyword(word) or word in _RESERVED or word[:1].isdigit()
    return f"{word.lstrip('0123456789')}{ending}" if is_taken else word or instead


def snake_case(cls: str) -> str:
    """``PoseGRU`` as ``pose_gru``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name(cls)).lower()
    return identifier(words) or "model"


def _names_of(block: Block, children: Sequence[Key], taken: set[str]) -> dict[Key, str]:
    if block.scope != ROOT and is_container(block.scope):
        return {key: f"[{place}]" for place, key in enumerate(children)}
    layers = {item.key: item.layer is not None for item in block.items if _is_module(item)}
    if block.scope == ROOT and len(children) == 1 and not layers[children[0]]:
        return {children[0]: "model"}
    bases = {
        key: _base(key, block.scope.full_path, prefers_class=block.scope == ROOT and not layers[key])
        for key in children
    }
    found: dict[Key, str] = {}
    for key, (base, number) in bases.items():
        is_alone = sum(other == base for other, _ in bases.values()) == 1
        name = _unique(base if is_alone else f"{base}{number}", taken | set(found.values()))
        found[key] = name
    return found


def _is_module(item: Call | Block) -> TypeGuard[Block]:
    return isinstance(item, Block) and not item.is_function


def _base(key: Key, parent: str, *, prefers_class: bool) -> tuple[str, str]:
    path, cls = key
    relative = path[len(parent) + 1 :] if parent and path.startswith(f"{parent}.") else path
    parts = relative.split(".") if relative else []
    number = "".join(part for part in parts[-1:] if part.isdigit())
    words = [part for part in parts if not part.isdigit()]
    base = identifier(words[-1]) if words and not prefers_class and not path.startswith("<") else None
    return base or snake_case(cls), number


def _unique(base: str, taken: set[str]) -> str:
    return next(name for name in numbered(base) if name not in taken and not keyword.iskeyword(name))
