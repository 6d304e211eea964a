"""A piece of a model as a tree of modules: what is printed as classes, as layers, as plain statements, and their names.

Built from the scopes of the calls. A module that only passes on to one child gives way to it; a container that is no
chain gives way to what it holds, and so does a module in ``torn``, which ran in ways that one `forward` cannot say.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import TypeGuard

from reprokit.program.ir import Call, Phase, Program, Scope, iter_refs
from reprokit.program.step import Step
from reprokit.render.names import identifier, name_for_input, numbered
from reprokit.shrink.context.layers import Layer, Scopes, is_container, is_layer, layers_in

Key = tuple[str, str]  # path and class of a module
_MAX_LOOSE = 4  # statements of a layer that cannot be printed as one; more become a class
_NO_CLASS = frozenset({"torch", "nn", "F", "Module", "Path", *dir(builtins)})


@dataclass(frozen=True)
class Block:
    """One run of a module: what it did, in order, what it read and what others need of it."""

    scope: Scope
    items: tuple[Call | Block, ...]
    layer: Layer | None = None
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        return self.scope.full_path, self.scope.cls

    @property
    def is_function(self) -> bool:
        """True if it is a function of the loop's, not a module."""
        return self.scope.path.endswith("()")

    @property
    def is_class(self) -> bool:
        return not (self.layer is not None or self.is_function or self.is_chain or self.key == ROOT_KEY)

    @property
    def is_chain(self) -> bool:
        return is_container(self.scope)

    @property
    def calls(self) -> list[Call]:
        """Every call inside, in order."""
        return [call for item in self.items for call in (item.calls if isinstance(item, Block) else [item])]

    @property
    def children(self) -> list[Block]:
        """The modules it calls itself, each once."""
        found: dict[Key, Block] = {}
        for item in self.items:
            if is_module(item):
                found.setdefault(item.key, item)
        return list(found.values())

    def blocks(self) -> Iterator[Block]:
        """The blocks inside, outermost first."""
        for item in self.items:
            if isinstance(item, Block):
                yield item
                yield from item.blocks()


ROOT_KEY: Key = ("", "")


def is_module(item: Call | Block) -> TypeGuard[Block]:
    """True if an item is a run of a module."""
    return isinstance(item, Block) and not item.is_function


@dataclass
class Tree:
    """A step as blocks. ``owners`` says which module keeps a parameter or buffer, ``own`` what it is called there."""

    step: Step
    layers: Mapping[Scopes, Layer]
    root: Block
    owners: Mapping[int, Key]
    parents: dict[Key, Key] = field(default_factory=dict)
    attributes: dict[Key, str] = field(default_factory=dict)  # of a module in its parent; in a chain its number
    own: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Step, torn: Collection[Key] = ()) -> Tree:
        """The tree of a step."""
        program, layers = step.program, layers_in(step)
        items = _with_functions(_nested(program.calls, 0))
        root = Block(Scope("", ""), tuple(_simplified(items, program, layers, torn)))
        root = _without_needless(_connected(root, program))
        tree = cls(step, layers, _connected(root, program), _owners(root, program))
        tree._give_names()
        return tree

    def modules(self) -> dict[Key, Block]:
        """Every module once, outermost first, in the order in which they are made."""
        found: dict[Key, Block] = {}
        for block in self.root.blocks():
            if not block.is_function:
                found.setdefault(block.key, block)
        return found

    def own_values(self, key: Key) -> list[int]:
        """The parameters and buffers that a module keeps itself, in the program's order."""
        return [item.value for item in self.step.program.inputs if self.owners.get(item.value) == key]

    def module_path(self, key: Key, inside: Key) -> str | None:
        """The path of a module from the forward of another one (or from the script); ``None`` from elsewhere."""
        steps: list[str] = []
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
        path = self.module_path(self.owners[value], inside)
        return f"{path}.{self.own[value]}" if path is not None else None

    def _give_names(self) -> None:
        for key, block in {ROOT_KEY: self.root, **self.modules()}.items():
            taken: set[str] = set()
            if block.layer is not None:
                self.own.update({value: name for name, value in block.layer.state.items()})
            for value in self.own_values(key) if block.layer is None else ():
                self.own[value] = _unique(name_for_input(self.step.program.input(value), self.step.program), taken)
                taken.add(self.own[value])
            self.parents.update(dict.fromkeys((child.key for child in block.children), key))
            self.attributes.update(_names_of(block, taken))


def _nested(calls: Sequence[Call], depth: int) -> Iterator[Call | Block]:
    """Calls grouped by the module they ran in, level by level."""
    for level, group in groupby(calls, key=lambda call: call.scope[: depth + 1]):
        if len(level) <= depth:
            yield from group
        else:
            yield Block(level[-1], tuple(_nested(list(group), depth + 1)))


def _with_functions(items: Iterable[Call | Block]) -> Iterator[Call | Block]:
    """Statements of the loop that come from one function of its own, as that function."""
    for function, group in groupby(items, key=_function):
        members = tuple(group)
        if function and len(members) > 1:
            yield Block(Scope(f"{function}()", function), members)
        else:
            yield from members


def _function(item: Call | Block) -> str:
    """The function that a forward call of the loop was written in; empty for the script's main part."""
    if isinstance(item, Block) or item.site is None or item.phase == Phase.BACKWARD or item.is_optimizer_step:
        return ""
    name = item.site.function.rpartition(".")[2]
    return name if name.isidentifier() and name != "main" else ""


def _simplified(
    items: Iterable[Call | Block], program: Program, layers: Mapping[Scopes, Layer], torn: Collection[Key]
) -> Iterator[Call | Block]:
    for item in items:
        if not is_module(item):
            yield from item.items if isinstance(item, Block) and item.key in torn else [item]
        elif is_layer(item.scope, program.modules):
            ran = item.calls[0].scope
            fitting = (made for s, made in layers.items() if item.scope == s[-1] and ran[: len(s)] == s)
            layer = next(fitting, None)
            is_loose = layer is None and (len(item.calls) <= _MAX_LOOSE or item.key in torn)
            yield from item.calls if is_loose else [replace(item, items=tuple(item.calls), layer=layer)]
        else:
            inner = tuple(_simplified(item.items, program, layers, torn))
            yield from inner if item.key in torn else [replace(item, items=inner)]


def _connected(root: Block, program: Program) -> Block:
    """The tree with what each block reads and makes."""
    owners = _owners(root, program)
    states = {item.value for item in program.inputs if item.role == "rng"}

    def connect(block: Block, needed: frozenset[int]) -> Block:
        items: list[Call | Block] = []
        after = needed
        for item in reversed(block.items):
            items.append(connect(item, after) if isinstance(item, Block) else item)
            after |= _read([item])
        if block.layer is not None:
            given = (*block.layer.positional, *block.layer.keywords.values())
            made = tuple(ref.value for ref in iter_refs(block.layer.outputs))
            return replace(block, reads=tuple(dict.fromkeys(given)), makes=tuple(dict.fromkeys(made)))
        inner = {block.key, *(inside.key for inside in block.blocks())}
        free, made_here = dict[int, None](), dict[int, None]()
        for call in block.calls:
            free.update(dict.fromkeys(value for value in call.input_refs() if value not in made_here))
            made_here.update(dict.fromkeys(call.output_refs()))
        reads = (value for value in free if value not in states and owners.get(value) not in inner)
        makes = (value for value in made_here if value in needed and value not in free)
        return replace(block, items=tuple(items[::-1]), reads=tuple(reads), makes=tuple(makes))

    return connect(root, frozenset(ref.value for ref in program.outputs))


def _read(items: Iterable[Call | Block]) -> frozenset[int]:
    calls = (call for item in items for call in (item.calls if isinstance(item, Block) else [item]))
    return frozenset(value for call in calls for value in call.input_refs())


def _owners(root: Block, program: Program) -> dict[int, Key]:
    """For each parameter or buffer the innermost module that everything which uses it is in.

    A parameter that a layer is called with, rather than keeps, is used by the module around it.
    """
    kept = {item.value for item in program.inputs if item.role in ("parameter", "buffer")}
    owners: dict[int, tuple[Key, ...]] = {}

    def visit(block: Block, path: tuple[Key, ...]) -> None:
        own = kept if block.layer is None else set(block.layer.state.values())
        for value in _read(item for item in block.items if isinstance(item, Call)) & kept if path else ():
            place = path if value in own else path[:-1]
            known = owners.setdefault(value, place)
            same = (index for index, (a, b) in enumerate(zip(known, place, strict=False)) if a != b)
            owners[value] = known[: next(same, min(len(known), len(place)))]
        for item in block.items:
            if isinstance(item, Block):
                visit(item, path if item.is_function else (*path, item.key))

    visit(root, ())
    found = {value: path[-1] for value, path in owners.items() if path}
    for block in root.blocks():
        if block.layer is not None:
            found.update(dict.fromkeys(block.layer.state.values(), block.key))
    return found


def _without_needless(root: Block) -> Block:
    """The tree without modules that only pass on to one child, and containers that are not one chain in every run."""
    while True:
        runs: dict[Key, list[Block]] = {}
        for block in root.blocks():
            if is_module(block) and block.layer is None:
                runs.setdefault(block.key, []).append(block)
        gone = {key for key, found in runs.items() if _is_needless(found)}
        if not gone:
            return root
        root = _without_levels(root, gone)


def _is_needless(runs: Sequence[Block]) -> bool:
    if all(len(block.items) == 1 and is_module(block.items[0]) for block in runs):
        return True
    children = {tuple(child.key for child in block.children) for block in runs}
    return runs[0].is_chain and (len(children) > 1 or not all(map(_is_chain, runs)))


def _without_levels(block: Block, gone: Collection[Key]) -> Block:
    items: list[Call | Block] = []
    for item in block.items:
        inner = _without_levels(item, gone) if isinstance(item, Block) else item
        items.extend(inner.items if isinstance(inner, Block) and inner.key in gone else [inner])
    return replace(block, items=tuple(items))


def _is_chain(block: Block) -> bool:
    """True if each item is another module that takes what the one before it returned, and nothing else."""
    if not all(is_module(item) and len(item.reads) == len(item.makes or (0,)) == 1 for item in block.items):
        return False
    inner = block.children
    follows = all(after.reads == (before.makes or before.reads) for before, after in pairwise(inner))
    is_plain = all(item.layer is None or not isinstance(item.layer.outputs, tuple) for item in inner)
    return follows and is_plain and len(inner) == len(block.items)


def as_word(text: str, instead: str, ending: str) -> str:
    """An identifier that is no keyword, nothing of Python's or torch's own, and does not begin with two underscores."""
    last = re.sub(r"\W", "_", text.rpartition(".")[2], flags=re.ASCII)
    word = last.strip("_") if last.startswith("__") else last
    is_taken = keyword.iskeyword(word) or word in _NO_CLASS or word[:1].isdigit()
    return f"{word.lstrip('0123456789')}{ending}" if is_taken else word or instead


def class_name(cls: str) -> str:
    """A class's name as it may stand in Python."""
    return as_word(cls, "Piece", "Module")


def _names_of(block: Block, taken: Collection[str]) -> dict[Key, str]:
    """The names of a block's children, numbered as in the user's model where several have one word."""
    children = block.children
    if block.is_chain:
        return {child.key: f"[{place}]" for place, child in enumerate(children)}
    is_root = block.key == ROOT_KEY
    if is_root and len(children) == 1 and children[0].layer is None:
        return {children[0].key: "model"}
    bases = {child.key: _base(child.key, block.key[0], is_root and child.layer is None) for child in children}
    found: dict[Key, str] = {}
    for key, (base, number) in bases.items():
        is_alone = sum(other == base for other, _ in bases.values()) == 1
        found[key] = _unique(base if is_alone else f"{base}{number}", {*taken, *found.values()})
    return found


def _base(key: Key, parent: str, prefers_class: bool) -> tuple[str, str]:
    """The last word in the path of a module, and its number in a list; else its class, as ``pose_gru``."""
    path, cls = key
    relative = path[len(parent) + 1 :] if parent and path.startswith(f"{parent}.") else path
    parts = relative.split(".")
    words = [part for part in parts if part and not part.isdigit()]
    base = identifier(words[-1]) if words and not prefers_class and not path.startswith("<") else None
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name(cls)).lower()
    return base or identifier(snake) or "model", parts[-1] if parts[-1].isdigit() else ""


def _unique(base: str, taken: Collection[str]) -> str:
    return next(name for name in numbered(base) if name not in taken and not keyword.iskeyword(name))
