"""The context repro: the piece of the user's model as `nn.Module` classes, ordinary inputs, and the check.

Modules keep the names they have in the user's code. Torch's layers are layers; what the user wrote is a straight-line
`forward`. Parameters are what the layers start with under a seed, or are set in one line each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reprokit.program.ir import Call, Input, Mode, Program, Ref
from reprokit.render import names, source
from reprokit.render.check import find_subject, outcome_words, write_check
from reprokit.render.gate import require_closed
from reprokit.render.kinds import words_of
from reprokit.render.literals import is_same, literal, number_text
from reprokit.render.module_tree import ROOT_KEY, Block, Key, Tree, as_word, class_name
from reprokit.render.printer import Code, expression, needed_mode, write_program
from reprokit.render.source import argument, assign, constant, define, fill, method, path
from reprokit.shrink.context.finder import Context
from reprokit.shrink.context.layers import SEED, initial
from reprokit.shrink.plainness import constant_of, seed_of
from reprokit.snapshot.files import write_text
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, visible_line

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


class _NeedsFile(Exception):
    """A tensor or a random state has no short expression."""


class _RanInTwoWays(Exception):
    """One `forward` cannot say what a module did."""

    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key = key


def write_module_script(
    context: Context, *, num_calls_before: int | None = None, torch_version: str = ""
) -> ModuleScript | None:
    """The context as a script; ``None`` when it would need a side file. Raises `NotReproduced` if it does not fail."""
    torn: set[Key] = set()
    while True:
        try:
            writer = _Writer(context, Tree.of(context.candidate, torn))
            return writer.write(num_calls_before, torch_version or torch.__version__)
        except _RanInTwoWays as found:
            torn.add(found.key)
        except _NeedsFile:
            return None


class _Writer:
    def __init__(self, context: Context, tree: Tree) -> None:
        self._context, self._tree, self._modules = context, tree, tree.modules()
        self._start = initial(tree.layers)
        self._inputs = {item.value: item for item in context.program.inputs}
        words = {**names.input_words(context.program), **names.result_words(context.program)}
        self._nouns = {**_words_for_unnamed(tree, words), **words}
        self._callees: dict[Key, str] = {}  # classes and functions
        self._definitions: dict[str, ast.ClassDef | ast.FunctionDef] = {}

    def write(self, num_calls_before: int | None, version: str) -> ModuleScript | None:
        program, tensors, failure = self._context.program, self._context.tensors, self._context.failure
        seen = {ref.value for ref in program.outputs} | self._inputs.keys()
        subject = find_subject(program, tensors, failure if failure.value in seen else replace(failure, value=None))
        start = self._random_start()
        for block in reversed(self._modules.values()):
            if block.is_class:
                self._define_class(block)
        for item in self._tree.root.items:
            if isinstance(item, Block) and item.is_function:
                name = self._callees[item.key] = as_word(item.scope.cls, "piece", "_")
                made = self._function(item, name)
                if source.lines(self._definitions.setdefault(name, made)) != source.lines(made):
                    raise _RanInTwoWays(item.key)
        setup = self._setup()
        code = self._code(subject.value if subject is not None else None)
        if code.side:
            return None
        check = write_check(subject, failure, code) if subject is not None else []
        header = self._header(num_calls_before, version, outcome_words(subject, code, failure))
        body = [*self._definitions.values(), *setup, *code.inputs, *start, *code.body]
        text = source.script(list(map(visible_line, header)), body, check)
        require_closed(text)
        return ModuleScript(text, sum(block.is_class for block in self._modules.values()), program.num_calls)

    def _header(self, num_calls_before: int | None, version: str, outcome: str) -> Iterator[str]:
        failure, calls = self._context.failure, self._context.program.num_calls
        words = words_of(failure)
        yield f"{redact_text(words.headline)} {words.phase} (torch {version})."
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
        """The modules, and the parameters that are not what their layers start with."""
        attributes, tensors = self._tree.attributes, self._context.tensors
        made = [assign(ast.Name(attributes[block.key]), self._made(block)) for block in self._tree.root.children]
        changed: list[ast.stmt] = []
        for block in self._modules.values():
            for name, value in block.layer.state.items() if block.layer is not None else ():
                is_start = is_same(self._start[value].contiguous(), tensors[value].contiguous())
                if name != "num_batches_tracked" and not is_start:
                    changed.append(_set_to(path(self._tree.value_path(value, ROOT_KEY) or ""), tensors[value]))
        numbers = (start for value, start in self._start.items() if is_same(start, tensors[value]))
        needs_seed = any(n.is_floating_point() and n.numel() > 0 and constant_of(n) not in (0, 1) for n in numbers)
        return [*(fill("torch.manual_seed(SEED)", SEED=constant(SEED)) if needs_seed else []), *made, *changed]

    def _code(self, kept: int | None) -> Code:
        root = self._tree.root
        return write_program(
            self._statements(root, self._context.program.inputs, ()),
            self._context.tensors,
            keep=[] if kept is None else [kept],
            given=self._paths(ROOT_KEY),
            nouns=self._nouns,
            reserved={*_RESERVED, *(self._tree.attributes[child.key] for child in root.children), *self._definitions},
        )

    def _paths(self, inside: Key) -> dict[int, str]:
        paths = {value: self._tree.value_path(value, inside) for value in self._inputs if value in self._tree.owners}
        return {value: path for value, path in paths.items() if path is not None}

    def _define_class(self, block: Block) -> None:
        """The class of a module, innermost first; modules with the same text share one."""
        own = [self._own_line(value) for value in self._tree.own_values(block.key)]
        children = [
            assign(path(f"self.{self._tree.attributes[child.key]}"), self._made(child)) for child in block.children
        ]
        forward = self._function(block, "forward")
        for run in self._tree.root.blocks():
            if run.key == block.key and source.lines(self._function(run, "forward")) != source.lines(forward):
                raise _RanInTwoWays(block.key)
        body: list[ast.stmt] = [forward]
        if own or children:
            first = ast.parse("super().__init__()").body
            body.insert(0, define("__init__", ["self"], [*first, *own, *children]))
        for name in names.numbered(class_name(block.scope.cls)):
            made = ast.parse(f"class {source.text(path(name))}(nn.Module): pass").body[0]
            assert isinstance(made, ast.ClassDef)
            made.body = body
            known = self._definitions.setdefault(name, made)
            if source.lines(known) == source.lines(made):
                self._callees[block.key] = name
                return

    def _own_line(self, value: int) -> ast.stmt:
        tensor, item, name = self._context.tensors[value], self._inputs[value], self._tree.own[value]
        numbers = literal(tensor)
        if numbers is None:
            raise _NeedsFile
        made = expression(numbers.text)
        if item.role == "parameter" and tensor.is_floating_point():
            return assign(path(f"self.{name}"), source.call("nn.Parameter", [made]))
        return ast.Expr(source.call("self.register_buffer", [constant(name), made]))

    def _function(self, block: Block, name: str) -> ast.FunctionDef:
        arguments = dict(self._argument_names(block))
        code = write_program(
            self._statements(block, [], block.makes),
            {},
            keep=block.makes,
            given={**({} if block.is_function else self._paths(block.key)), **arguments},
            nouns=self._nouns,
            reserved=_RESERVED,
        )
        body = list(code.body)
        returned = [code.names[value] for value in block.makes]
        match body[-1:]:
            case [ast.Assign([ast.Name(target)], value)] if returned == [target]:
                body[-1] = ast.Return(value)
            case [ast.Expr(value)] if not returned:  # it raises
                body[-1] = ast.Return(value)
            case _ if returned:
                shown = ast.Name(", ".join(source.text(path(word)) for word in returned))
                body.append(ast.Return(shown))
        first = () if block.is_function else ("self",)
        return define(name, (*first, *arguments.values()), body or [ast.Pass()])

    def _argument_names(self, block: Block) -> Iterator[tuple[int, str]]:
        known = names.Identifiers(_RESERVED)
        inner = replace(self._context.program, calls=tuple(block.calls))
        words = {value: word for value, word in names.operand_words(inner.calls).items() if names.identifier(word)}
        makers = {v: call for call in self._context.program.calls for v in call.output_refs()}
        for value in block.reads:
            noun = self._nouns.get(value)
            item = self._inputs.get(value) or Input(value, noun or names.name_for_output(makers[value]))
            yield value, known.give(value, words.get(value) or names.name_for_input(item, inner, noun))

    def _statements(self, block: Block, inputs: Sequence[Input], ends: Sequence[int]) -> Program:
        """A block as a program: its own calls, and one call for every child."""
        calls = [item if isinstance(item, Call) else self._child_call(item, block.key) for item in block.items]
        calls = [replace(call, mode=replace(call.mode, rng=None)) for call in calls]
        if block.key != ROOT_KEY and (mode := _uniform_mode(block)) is not None:
            calls = [replace(call, mode=Mode()) if call.mode == mode else call for call in calls]
        return Program(tuple(calls), tuple(inputs), tuple(map(Ref, ends)))

    def _child_call(self, block: Block, inside: Key) -> Call:
        target = self._callees.get(block.key) if block.is_function else self._tree.module_path(block.key, inside)
        mode = _uniform_mode(block) or Mode()
        if block.layer is not None:
            layer = block.layer
            keywords = {name: Ref(value) for name, value in layer.keywords.items()}
            return Call(target or "", tuple(map(Ref, layer.positional)), keywords, layer.outputs, mode=mode)
        made = tuple(map(Ref, block.makes))
        outputs: Any = made[0] if len(made) == 1 else made or None
        return Call(target or "", tuple(map(Ref, block.reads)), {}, outputs, mode=mode)

    def _made(self, block: Block) -> ast.expr:
        if (layer := block.layer) is not None:
            arguments = [argument(value, _no_tensor) for value in layer.arguments]
            options = {name: argument(value, _no_tensor) for name, value in layer.options.items()}
            (filled,) = fill(f"LAYER{layer.suffix}", LAYER=source.call(f"nn.{layer.cls}", arguments, options))
            assert isinstance(filled, ast.Expr)
            is_off = not layer.training and layer.cls.startswith(_MODE_MATTERS)
            return method(filled.value, "eval") if is_off else filled.value
        if block.is_chain:
            return source.call("nn.Sequential", [self._made(child) for child in block.children])
        return source.call(self._callees[block.key])


def _words_for_unnamed(tree: Tree, words: Mapping[int, str]) -> dict[int, str]:
    """Words for inputs that the user's lines do not name and a module or function reads, so that each has one name on
    both sides of a call, and no other value has it."""
    program, known = tree.step.program, names.Identifiers(_RESERVED.union(words.values()))
    read = {value for block in tree.root.blocks() if block.layer is None for value in block.reads}
    unnamed = [item for item in program.inputs if item.value in read - words.keys() and names.own_name(item) is None]
    return {item.value: known.give(item.value, names.name_for_input(item, program)) for item in unnamed}


def _uniform_mode(block: Block) -> Mode | None:
    """The modes that everything in a block ran in, ``None`` when they differ."""
    modes = {needed_mode(call) for call in block.calls}
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
