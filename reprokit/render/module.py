"""The context repro: the piece of the user's model as `nn.Module` classes, ordinary inputs, and the check.

Modules keep the names they have in the user's code. Torch's layers are layers; what the user wrote is a straight-line
`forward`. Parameters are what the layers start with under a seed, or are set in one line each.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch

from reprokit.program.ir import Call, Input, Mode, Program, Ref
from reprokit.render import names, source
from reprokit.render.check import Subject, find_subject, outcome_words, write_check
from reprokit.render.gate import require_closed
from reprokit.render.literals import Literal, is_same, literal, number_text
from reprokit.render.names import identifier, input_words, name_for_input, numbered, operand_words, result_words
from reprokit.render.printer import Code, expression, needed_mode, write_program
from reprokit.render.source import argument, assign, constant, define, fill, method, path
from reprokit.render.wording import headline, phase_words
from reprokit.shrink.context.step import is_container
from reprokit.shrink.context.tree import (
    ROOT,
    SEED,
    Block,
    Context,
    Key,
    Tree,
    calls_of,
    initial,
    modules_in_order,
    own_values,
)
from reprokit.shrink.plainness import constant_of, seed_of
from reprokit.snapshot.files import write_text
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, visible_line

_NO_CLASS = frozenset({"torch", "nn", "F", "Module", "Path", *dir(builtins)})


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
    is_taken = keyword.iskeyword(word) or word in _NO_CLASS or word[:1].isdigit()
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


MODULE_FILE = "repro_module.py"
MAX_LINES = 60
_RESERVED = frozenset({"nn", "self"})
_MODE_MATTERS = ("BatchNorm", "Dropout", "RNN", "GRU", "LSTM", "MultiheadAttention", "InstanceNorm", "RReLU")


@dataclass(frozen=True, slots=True)
class ModuleScript:
    """The text of a context repro, with how many classes and torch calls it has."""

    text: str
    modules: int
    calls: int

    @property
    def num_lines(self) -> int:
        """Lines, blank ones and comments included."""
        return len(self.text.splitlines())

    def write(self, folder: Path) -> Path:
        path = folder / MODULE_FILE
        write_text(path, self.text)
        return path


def write_module_script(
    context: Context, *, num_calls_before: int | None = None, torch_version: str | None = None
) -> ModuleScript | None:
    """The context as a script; ``None`` when it would need a side file. Raises `NotReproduced` if it does not fail."""
    return _Writer(context, context.tree).write(num_calls_before, torch_version or torch.__version__)


class _NeedsFile(Exception):
    """A tensor or a random state has no short expression."""


class _Writer:
    def __init__(self, context: Context, tree: Tree) -> None:
        self._context = context
        self._tree = tree
        self._names = ModuleNames(tree)
        self._start = initial(tree, context.tensors, context.drawn)
        self._inputs = {item.value: item for item in context.program.inputs}
        words = {**input_words(context.program), **result_words(context.program)}
        self._nouns = {**_words_for_unnamed(tree, words), **words}
        self._classes: dict[Key, str] = {}
        self._definitions: dict[str, ast.ClassDef | ast.FunctionDef] = {}

    def write(self, num_calls_before: int | None, version: str) -> ModuleScript | None:
        seen = {ref.value for ref in self._context.program.outputs} | self._inputs.keys()
        failure = self._context.failure
        failure = failure if failure.value in seen else replace(failure, value=None)
        subject = find_subject(self._context.program, self._context.tensors, failure)
        try:
            start = self._random_start()
            for block in reversed(modules_in_order(self._tree.root)):
                if block.layer is None and not is_container(block.scope):
                    self._define_class(block)
            for item in self._tree.root.items:
                if isinstance(item, Block) and item.is_function:
                    name = function_name(item.scope.cls)
                    self._definitions.setdefault(name, self._function(item, name, ()))
            setup = self._setup()
        except _NeedsFile:
            return None
        code = self._script_code(subject)
        if code.side:
            return None
        check = write_check(subject, self._context.failure, code) if subject is not None else []
        header = self._header(num_calls_before, version, outcome_words(subject, code, self._context.failure))
        body = [*self._definitions.values(), *setup, *code.inputs, *start, *code.body]
        text = source.script(list(map(visible_line, header)), body, check)
        require_closed(text)
        return ModuleScript(text, self._tree.num_modules, self._context.program.num_calls)

    # -- the script ----------------------------------------------------------------------------------------------

    def _header(self, num_calls_before: int | None, version: str, outcome: str) -> Iterator[str]:
        failure, calls = self._context.failure, self._context.program.num_calls
        yield f"{redact_text(headline(failure))} {phase_words(failure)} (torch {version})."
        if outcome:
            yield outcome
        was = f"{counted(num_calls_before, 'torch call')} of a training step" if num_calls_before else "a training step"
        yield f"The part of the model where it happens, reduced by reprokit from {was} to {calls}."
        if not self._context.is_ordinary:
            yield "Some inputs or parameters are not ordinary numbers: with ordinary ones no part of the model fails."
        yield "Ends with exit code 1 while the failure is there, and with 0 once it is gone."

    def _random_start(self) -> list[ast.stmt]:
        """The line that seeds the generator before the one call that is random."""
        states = [call.mode.rng.value for call in self._context.program.calls if call.mode.rng is not None]
        if not states:
            return []
        seed = seed_of(self._context.tensors[states[0]]) if len(states) == 1 else None
        if seed is None:
            raise _NeedsFile
        return fill("torch.manual_seed(SEED)", SEED=constant(seed))

    def _setup(self) -> list[ast.stmt]:
        made = [
            assign(ast.Name(self._names.attributes[block.key]), self._made(block))
            for block in _children(self._tree.root)
        ]
        changed: list[ast.stmt] = []
        for block in self._tree.layers():
            for name, value in block.layer.state.items() if block.layer is not None else ():
                tensor = self._context.tensors[value]
                if name == "num_batches_tracked" or is_same(self._start[value].contiguous(), tensor.contiguous()):
                    continue
                place = self._names.value_path(value, ROOT_KEY)
                if place is None:
                    raise _NeedsFile
                changed.append(_set_to(path(place), tensor))
        numbers = (start for value, start in self._start.items() if is_same(start, self._context.tensors[value]))
        needs_seed = any(n.is_floating_point() and n.numel() > 0 and constant_of(n) not in (0, 1) for n in numbers)
        return [*(fill("torch.manual_seed(SEED)", SEED=constant(SEED)) if needs_seed else []), *made, *changed]

    def _script_code(self, subject: Subject | None) -> Code:
        root = self._tree.root
        program = self._statements(root, ROOT_KEY, self._context.program.inputs, ())
        return write_program(
            program,
            self._context.tensors,
            keep=[] if subject is None else [subject.value],
            given=self._paths(ROOT_KEY),
            written={value: _drawn(self._context.tensors[value]) for value in self._context.drawn},
            nouns=self._nouns,
            reserved={*_RESERVED, *(self._names.attributes[b.key] for b in _children(root)), *self._definitions},
        )

    def _paths(self, inside: Key) -> dict[int, str]:
        values = (value for value in self._inputs if value in self._tree.owners or value in self._names.layer_of)
        paths = {value: self._names.value_path(value, inside) for value in values}
        return {value: path for value, path in paths.items() if path is not None}

    # -- classes -------------------------------------------------------------------------------------------------

    def _define_class(self, block: Block) -> None:
        """The class of a module, innermost first; modules with the same text share one."""
        own = [self._own_line(value) for value in own_values(self._tree, block.key)]
        children = [
            assign(path(f"self.{self._names.attributes[child.key]}"), self._made(child)) for child in _children(block)
        ]
        body: list[ast.stmt] = []
        if own or children:
            first = ast.parse("super().__init__()").body
            body.append(define("__init__", ["self"], [*first, *own, *children]))
        body.append(self._function(block, "forward", ("self",)))
        for name in numbered(class_name(block.scope.cls)):
            made = ast.parse(f"class {source.text(path(name))}(nn.Module): pass").body[0]
            assert isinstance(made, ast.ClassDef)
            made.body = body
            known = self._definitions.setdefault(name, made)
            if source.lines(known) == source.lines(made):
                self._classes[block.key] = name
                return

    def _own_line(self, value: int) -> ast.stmt:
        tensor, item, name = self._context.tensors[value], self._inputs[value], self._names.own[value]
        found = _drawn(tensor) if value in self._context.drawn else literal(tensor)
        if found is None:
            raise _NeedsFile
        made = expression(found.text)
        if item.role == "parameter" and tensor.is_floating_point():
            return assign(path(f"self.{name}"), source.call("nn.Parameter", [made]))
        return ast.Expr(source.call("self.register_buffer", [constant(name), made]))

    def _function(self, block: Block, name: str, first: tuple[str, ...]) -> ast.FunctionDef:
        arguments = dict(self._argument_names(block))
        program = self._statements(block, block.key, [], block.makes)
        given = {**({} if block.is_function else self._paths(block.key)), **arguments}
        code = write_program(program, {}, keep=block.makes, given=given, nouns=self._nouns, reserved=_RESERVED)
        body = list(code.body)
        returned = [code.names[value] for value in block.makes]
        match body[-1:]:
            case [ast.Assign([ast.Name(target)], value)] if returned == [target]:
                body[-1] = ast.Return(value)
            case _ if returned:
                shown = ast.Name(", ".join(source.text(path(word)) for word in returned))
                body.append(ast.Return(shown))
        return define(name, (*first, *arguments.values()), body or [ast.Pass()])

    def _argument_names(self, block: Block) -> Iterator[tuple[int, str]]:
        known = names.Identifiers(_RESERVED)
        inner = replace(self._context.program, calls=tuple(calls_of(block)))
        words = {value: word for value, word in operand_words(inner.calls).items() if names.identifier(word)}
        makers = {v: call for call in self._context.program.calls for v in call.output_refs()}
        for value in block.reads:
            noun = self._nouns.get(value)
            item = self._inputs.get(value) or Input(value, noun or names.name_for_output(makers[value]))
            yield value, known.give(value, words.get(value) or names.name_for_input(item, inner, noun))

    def _statements(self, block: Block, inside: Key, inputs: Any, ends: tuple[int, ...]) -> Program:
        """A block as a program: its own calls, and one call for every child."""
        calls = [item if isinstance(item, Call) else self._child_call(item, inside) for item in block.items]
        calls = [replace(call, mode=replace(call.mode, rng=None)) for call in calls]
        if inside != ROOT_KEY and (mode := _uniform_mode(block)) is not None:
            calls = [replace(call, mode=Mode()) if call.mode == mode else call for call in calls]
        return Program(tuple(calls), tuple(inputs), tuple(Ref(value) for value in ends))

    def _child_call(self, block: Block, inside: Key) -> Call:
        target = self._names.module_path(block.key, inside)
        assert target is not None, "a child is reached from its parent"
        mode = _uniform_mode(block) or Mode()
        if block.layer is not None:
            layer = block.layer
            keywords = {name: Ref(value) for name, value in layer.keywords.items()}
            return Call(target, tuple(map(Ref, layer.positional)), keywords, layer.outputs, mode=mode)
        made = tuple(Ref(value) for value in block.makes)
        outputs: Any = made[0] if len(made) == 1 else made or None
        return Call(target, tuple(Ref(value) for value in block.reads), {}, outputs, mode=mode)

    def _made(self, block: Block) -> ast.expr:
        if block.layer is not None:
            layer = block.layer
            arguments = [argument(value, _no_tensor) for value in layer.arguments]
            options = {name: argument(value, _no_tensor) for name, value in layer.options.items()}
            made = source.call(f"nn.{layer.cls}", arguments, options)
            (filled,) = fill(f"LAYER{layer.suffix}", LAYER=made)
            assert isinstance(filled, ast.Expr)
            is_off = not layer.training and layer.cls.startswith(_MODE_MATTERS)
            return method(filled.value, "eval") if is_off else filled.value
        if is_container(block.scope):
            return source.call("nn.Sequential", [self._made(child) for child in _children(block)])
        return source.call(self._classes[block.key])


def _words_for_unnamed(tree: Tree, words: Mapping[int, str]) -> dict[int, str]:
    """Words for inputs that the user's lines do not name and a module or function reads, so that each has one name on
    both sides of a call, and no other value has it."""
    program, known = tree.program, names.Identifiers(_RESERVED.union(words.values()))
    blocks = [block for block in tree.root.blocks() if block is not tree.root and block.layer is None]
    read = {value for block in blocks for value in block.reads}
    unnamed = [item for item in program.inputs if item.value in read - words.keys() and names.own_name(item) is None]
    return {item.value: known.give(item.value, names.name_for_input(item, program)) for item in unnamed}


def _children(block: Block) -> list[Block]:
    found: dict[Key, Block] = {}
    for item in block.items:
        if isinstance(item, Block) and not item.is_function:
            found.setdefault(item.key, item)
    return list(found.values())


def _uniform_mode(block: Block) -> Mode | None:
    """The modes that everything in a block ran in, ``None`` when they differ."""
    modes = {needed_mode(call) for call in calls_of(block)}
    return modes.pop() if len(modes) == 1 else None


def _no_tensor(value: Any) -> ast.expr:
    raise TypeError(f"a constructor argument cannot be `{type(value).__name__}`")


def _set_to(place: ast.expr, tensor: torch.Tensor) -> ast.stmt:
    constant = constant_of(tensor)
    if constant is None:
        numbers = literal(tensor)
        if numbers is None:
            raise _NeedsFile
        return assign(ast.Attribute(place, "data"), expression(numbers.text))
    if constant in (0, 1):
        return ast.Expr(source.call(f"nn.init.{'ones' if constant else 'zeros'}_", [place]))
    return ast.Expr(source.call("nn.init.constant_", [place, expression(number_text(constant, tensor.dtype))]))


def _drawn(tensor: torch.Tensor) -> Literal:
    sizes = tuple(str(size) for size in tensor.shape)
    dtype = () if tensor.dtype == torch.float32 else (f"dtype={tensor.dtype}",)
    return Literal("randn", (*sizes, *dtype))
