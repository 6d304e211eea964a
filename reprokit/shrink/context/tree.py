"""The context as a tree of modules: what is printed as classes, what as torch's layers, what as plain statements.

Built from the scopes of a candidate's calls. A module that only passes on to one child gives way to it; one that ran
twice and did different things each time gives way to its statements, since one `forward` cannot say both.

`Context` is what is kept: the program of the piece, its tensors, its failure, and its initial values. These are drawn
in the order of the printed script: for each module its own parameters first, then its children, then the inputs. So the
renderer can tell, by doing the same, which tensors need no words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from reprokit.grammar import Count
from reprokit.locate.failure import Failure
from reprokit.program.ir import Call, ModuleNote, Phase, Program, Ref, Scope, map_leaves
from reprokit.program.step import Step
from reprokit.shrink.context.layers import Layer, LayerRun, is_layer, layer_of, values_made, values_read
from reprokit.shrink.context.step import is_container
from reprokit.shrink.recording import Recording, record
from reprokit.snapshot.format import StoredProgram, StoredTensors

Key = tuple[str, str]  # path and class of a module
_MAX_LOOSE = 4  # statements of a layer that could not be rebuilt; more become a class


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


def tree_of(candidate: Step) -> Tree:
    """The tree of a candidate."""
    recording = record(candidate, frozenset(range(len(candidate.program.calls))))
    program = candidate.program
    root = Block(ROOT, tuple(_with_functions(list(_nested(list(program.calls), 0)))))
    root = connected(root, program)
    root = _Normaliser(program, recording).normal(root)
    root = connected(root, program)
    return Tree(program, root, owners_in(root, program))


def _nested(calls: list[Call], depth: int) -> Iterator[Call | Block]:
    """Calls grouped by the module they ran in, level by level."""
    position = 0
    while position < len(calls):
        call = calls[position]
        if len(call.scope) <= depth:
            yield call
            position += 1
            continue
        level = call.scope[: depth + 1]
        end = position
        while end < len(calls) and calls[end].scope[: depth + 1] == level:
            end += 1
        yield Block(level[-1], tuple(_nested(calls[position:end], depth + 1)))
        position = end


def _with_functions(items: list[Call | Block]) -> Iterator[Call | Block]:
    """Statements of the loop that come from one function of its own, as that function."""
    for function, group in groupby(items, key=_function):
        members = list(group)
        if function and len(members) > 1:
            yield Block(Scope(f"{function}()", function), tuple(members))
        else:
            yield from members


def _function(item: Call | Block) -> str:
    """The function that a forward call of the loop was written in; empty for the script's main part."""
    if isinstance(item, Block) or item.site is None or item.phase == Phase.BACKWARD or item.is_optimizer_step:
        return ""
    name = item.site.function.rpartition(".")[2]
    return name if name.isidentifier() and name != "main" else ""


@dataclass
class _Normaliser:
    """Brings a tree into a form that can be printed."""

    program: Program
    recording: Recording
    taken: dict[int, Key] = field(default_factory=dict)

    def normal(self, root: Block) -> Block:
        """Layers recognised, empty levels gone, modules that contradict themselves taken apart."""
        root = replace(root, items=tuple(self._items(root)))
        while True:
            torn = self._contradictions(root)
            if not torn:
                return root
            root = connected(_without_levels(root, torn), self.program)

    def _items(self, block: Block) -> Iterator[Call | Block]:
        for item in block.items:
            if not isinstance(item, Block):
                yield item
                continue
            if item.is_function:
                yield item
                continue
            if is_layer(item.scope, self.program.modules):
                yield from self._layer(item)
                continue
            inner = replace(item, items=tuple(self._items(item)))
            if len(inner.items) == 1 and isinstance(inner.items[0], Block):
                yield inner.items[0]
            elif is_container(item.scope) and not self._is_chain(inner):
                yield from inner.items
            else:
                yield inner

    def _layer(self, block: Block) -> Iterator[Call | Block]:
        calls = calls_of(block)
        inputs = {item.value: item for item in self.program.inputs}
        note = self.program.modules.get(block.scope.label)
        layer = layer_of(block.scope, self._run(block, calls), inputs, _fitting_note(note, block.scope))
        if layer is not None and all(self.taken.setdefault(v, block.key) == block.key for v in layer.state.values()):
            yield replace(block, layer=layer)
        elif len(calls) > _MAX_LOOSE:
            yield replace(block, items=tuple(calls))
        else:
            yield from calls

    def _run(self, block: Block, calls: list[Call]) -> LayerRun:
        """What was recorded of a layer's calls."""
        recording = self.recording
        before: dict[int, torch.Tensor] = {}
        after: dict[int, torch.Tensor] = {}
        for index, call in enumerate(self.program.calls):
            if any(call is inner for inner in calls):
                for value in call.input_refs():
                    before.setdefault(value, recording.inputs[index, value])
                made = (value for value in call.output_refs() if value in recording.outputs)
                after.update({value: recording.outputs[value] for value in made})
        raised = recording.error_call
        error = recording.error if raised is not None and self.program.calls[raised] is calls[-1] else None
        return LayerRun(calls, block.makes or calls[-1].output_refs(), before, after, error)

    def _is_chain(self, block: Block) -> bool:
        """True if each item is a module that takes what the one before it returned, and nothing else."""
        owners = owners_in(Block(ROOT, (block,)), self.program)
        previous: tuple[int, ...] | None = None
        (inner,) = connected(Block(ROOT, (block,)), replace(self.program, outputs=tuple(map(Ref, block.makes)))).items
        assert isinstance(inner, Block)
        for item in inner.items:
            if not isinstance(item, Block):
                return False
            reads = tuple(value for value in item.reads if value not in owners)
            if len(reads) != 1 or (previous is not None and reads != previous):
                return False
            if item.layer is not None and not isinstance(item.layer.outputs, Ref):
                return False
            previous = item.makes or reads
        return len({item.key for item in inner.items if isinstance(item, Block)}) == len(inner.items)

    def _contradictions(self, root: Block) -> set[Key]:
        """The modules that ran more than once, each time with different statements or parameters."""
        forms: dict[Key, set[str]] = {}
        owners = owners_in(root, self.program)
        for block in root.blocks():
            if block is not root:
                forms.setdefault(block.key, set()).add(_form(block, owners))
        return {key for key, found in forms.items() if len(found) > 1}


def _fitting_note(note: ModuleNote | None, scope: Scope) -> ModuleNote | None:
    """What was noted of a module, unless another root has one of the same name."""
    return note if note is not None and note.cls.rpartition(".")[2] == scope.cls else None


def _without_levels(block: Block, torn: set[Key]) -> Block:
    """The tree with the items of some modules in their place."""
    items: list[Call | Block] = []
    for item in block.items:
        if not isinstance(item, Block):
            items.append(item)
        elif item.key in torn:
            items.extend(_without_levels(item, torn).items if item.layer is None else calls_of(item))
        else:
            items.append(_without_levels(item, torn))
    return replace(block, items=tuple(items))


def _form(block: Block, owners: Mapping[int, Key]) -> str:
    """What a block does, with its values numbered in the order in which they appear."""
    numbers: dict[int, object] = {}

    def number(leaf: object) -> object:
        if not isinstance(leaf, Ref):
            return leaf
        if leaf.value in owners:
            return leaf
        return numbers.setdefault(leaf.value, f"#{len(numbers)}")

    lines = []
    if block.layer is not None:
        layer = block.layer
        lines.append(f"{layer.cls} {layer.arguments} {layer.options} {layer.state}")
        refs = (tuple(map(Ref, layer.positional)), {n: Ref(v) for n, v in layer.keywords.items()}, layer.outputs)
        return f"{lines[0]} {map_leaves(refs, number)}"
    for call in calls_of(block):
        content = map_leaves((call.args, dict(call.kwargs), call.outputs), number)
        lines.append(f"{call.scope[-1].path if call.scope else ''} {call.target} {content} {call.mode}")
    lines.append(str([number(Ref(value)) for value in (*block.reads, *block.makes)]))
    return "\n".join(lines)


SEED = 0


def initial(tree: Tree, tensors: Mapping[int, torch.Tensor], drawn: Collection[int]) -> dict[int, torch.Tensor]:
    """The initial parameters and buffers of all layers, and random numbers for the values in ``drawn``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return dict(_made(tree, tensors, drawn))


def _made(
    tree: Tree, tensors: Mapping[int, torch.Tensor], drawn: Collection[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    for block in modules_in_order(tree.root):
        if block.layer is not None:
            module = block.layer.build()
            given = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            yield from ((value, given[name].detach()) for name, value in block.layer.state.items())
            continue
        for value in own_values(tree, block.key):
            if value in drawn:
                yield value, normal_numbers(tensors[value])
    for value in script_values(tree):
        if value in drawn:
            yield value, normal_numbers(tensors[value])


def normal_numbers(like: torch.Tensor) -> torch.Tensor:
    """``torch.randn`` of this shape and dtype."""
    return torch.randn(tuple(like.shape), dtype=like.dtype)


def modules_in_order(root: Block) -> list[Block]:
    """Every module once, outermost first, in the order in which they are made."""
    found: dict[Key, Block] = {}
    for block in root.blocks():
        if block is not root and not block.is_function:
            found.setdefault(block.key, block)
    return list(found.values())


def own_values(tree: Tree, key: Key) -> list[int]:
    """The parameters and buffers that a module of the user's keeps itself, in the program's order."""
    in_layers = {value for block in tree.layers() if block.layer for value in block.layer.state.values()}
    return [
        item.value for item in tree.program.inputs if tree.owners.get(item.value) == key and item.value not in in_layers
    ]


def script_values(tree: Tree) -> list[int]:
    """The inputs that no module keeps, generator states not included."""
    return [item.value for item in tree.program.inputs if item.role != "rng" and item.value not in tree.owners]


@dataclass(frozen=True)
class Context:
    """The piece of the model that was found.

    ``drawn`` lists the inputs that hold `torch.randn` under the seed of the layers. ``is_ordinary`` tells whether all
    inputs are ordinary; if not, nothing in the step was. ``checks`` and ``seconds`` are what it took.
    """

    program: StoredProgram
    tensors: StoredTensors
    failure: Failure
    drawn: tuple[int, ...] = ()
    is_ordinary: bool = True
    checks: Count = 0
    seconds: float = 0.0

    @property
    def candidate(self) -> Step:
        """As a candidate."""
        return Step.of(self)

    @property
    def tree(self) -> Tree:
        """As modules."""
        return tree_of(self.candidate)
