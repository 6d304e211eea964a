"""Blocks: the calls of a context nested like its modules, what each block reads and makes, who keeps a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from reprokit.program.ir import Call, Program, Scope
from reprokit.shrink.context.layers import Layer, values_made, values_read
from reprokit.shrink.context.step import is_container

Key = tuple[str, str]  # path and class of a module


@dataclass(frozen=True)
class Block:
    """One run of a module: what it did, in order. ``layer`` is there when it is one of torch's."""

    scope: Scope
    items: tuple[Call | Block, ...]
    layer: Layer | None = None
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()

    @property
    def is_function(self) -> bool:
        """True if it is a function of the loop's, not a module."""
        return self.scope.path.endswith("()")

    @property
    def key(self) -> Key:
        """Which module it is."""
        return self.scope.full_path, self.scope.cls

    def blocks(self) -> Iterator[Block]:
        """The blocks inside, this one included, outermost first."""
        yield self
        for item in self.items:
            if isinstance(item, Block):
                yield from item.blocks()


@dataclass(frozen=True)
class Tree:
    """A candidate as blocks and statements.

    ``owners`` says which module keeps a parameter or buffer; those of the script are not listed. ``program`` is the
    candidate's, ``root`` stands for the script.
    """

    program: Program
    root: Block
    owners: Mapping[int, Key] = field(default_factory=dict)

    @property
    def num_modules(self) -> int:
        """How many classes of the user's there are."""
        blocks = [block for block in self.root.blocks() if block is not self.root and block.layer is None]
        return len({block.key for block in blocks if not (is_container(block.scope) or block.is_function)})

    def layers(self) -> list[Block]:
        """The layers, one for each module, in the order in which the script makes them."""
        found: dict[Key, Block] = {}
        for block in self.root.blocks():
            if block.layer is not None:
                found.setdefault(block.key, block)
        return list(found.values())


ROOT = Scope("", "")


def calls_of(block: Block) -> list[Call]:
    """Every call inside, in order."""
    return [call for item in block.items for call in (calls_of(item) if isinstance(item, Block) else [item])]


def connected(root: Block, program: Program) -> Block:
    """The tree with what each block reads and makes."""
    ends = {ref.value for ref in program.outputs}
    owners = owners_in(root, program)
    states = {item.value for item in program.inputs if item.role == "rng"}

    def connect(block: Block, needed: frozenset[int]) -> Block:
        items: list[Call | Block] = []
        after = set(needed)
        for item in reversed(block.items):
            calls = calls_of(item) if isinstance(item, Block) else [item]
            items.append(connect(item, frozenset(after)) if isinstance(item, Block) else item)
            after |= {value for call in calls for value in call.input_refs()}
        calls = calls_of(block)
        inner = {inside.key for inside in block.blocks()}
        given = dict.fromkeys(
            value
            for value in _free(calls)
            if value not in states and (value not in owners or owners[value] not in inner)
        )
        made = dict.fromkeys(v for call in calls for v in call.output_refs() if v not in _free(calls))
        layer = block.layer
        return replace(
            block,
            items=tuple(reversed(items)),
            reads=tuple(given) if layer is None else values_read(layer),
            makes=tuple(value for value in made if value in needed) if layer is None else values_made(layer),
        )

    return connect(root, frozenset(ends))


def _free(calls: list[Call]) -> dict[int, None]:
    """What calls read that was there before them, in order."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for call in calls:
        found.update(dict.fromkeys(value for value in call.input_refs() if value not in made))
        made.update(call.output_refs())
    return found


def owners_in(root: Block, program: Program) -> dict[int, Key]:
    """For each parameter or buffer the innermost module that everything which uses it is in.

    What one of torch's layers is called with, rather than what it keeps, is used by the module around it.
    """
    kept = {item.value for item in program.inputs if item.role in ("parameter", "buffer")}
    places: dict[int, list[tuple[Key, ...]]] = {}

    def visit(block: Block, path: tuple[Key, ...]) -> None:
        for item in block.items:
            if isinstance(item, Block):
                visit(item, path if item.is_function else (*path, item.key))
            elif path:
                own = kept if block.layer is None else set(block.layer.state.values())
                for value in set(item.input_refs()) & kept:
                    places.setdefault(value, []).append(path if value in own else path[:-1])

    visit(root, ())
    owners = {}
    for value, paths in places.items():
        common = paths[0]
        for path in paths[1:]:
            same = (index for index, (a, b) in enumerate(zip(common, path, strict=False)) if a != b)
            common = common[: next(same, min(len(common), len(path)))]
        if common:
            owners[value] = common[-1]
    return owners
