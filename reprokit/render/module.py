"""The context repro: the piece of the user's model as `nn.Module` classes, ordinary inputs, and the check.

Modules keep the names they have in the user's code. Torch's layers are layers; what the user wrote is a straight-line
`forward`. Parameters are what the layers start with under a seed, or are set in one line each.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch

from reprokit.program.ir import Call, Input, Mode, Program, Ref
from reprokit.render import expression, names
from reprokit.render.check import Subject, find_subject, outcome_words, write_check
from reprokit.render.code import Code, needed_mode, write_program
from reprokit.render.expression import WIDTH, Expr, fold
from reprokit.render.gate import require_closed
from reprokit.render.literals import Literal, is_same, literal, number_text
from reprokit.render.names import identifier, input_words, name_for_input, numbered, operand_words, result_words
from reprokit.render.templates import render_template
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
        self._texts: dict[str, list[str]] = {}

    def write(self, num_calls_before: int | None, version: str) -> ModuleScript | None:
        start = self._random_start()
        if start is None:
            return None
        seen = {ref.value for ref in self._context.program.outputs} | self._inputs.keys()
        failure = self._context.failure
        failure = failure if failure.value in seen else replace(failure, value=None)
        subject = find_subject(self._context.program, self._context.tensors, failure)
        if not self._write_classes():
            return None
        for block in self._tree.root.items:
            if isinstance(block, Block) and block.is_function:
                name = function_name(block.scope.cls)
                self._texts.setdefault(name, self._body(block, name, ()))
        setup = self._setup()
        code = self._script_code(subject)
        if setup is None or code.side:
            return None
        check = write_check(subject, self._context.failure, code) if subject is not None else []
        outcome, classes = outcome_words(subject, code, self._context.failure), list(self._texts.values())
        lines = [line for block in (*classes, setup, code.inputs, code.body) for line in block]
        text = render_template(
            "repro_module.py.j2",
            header=list(map(visible_line, self._header(num_calls_before, version, outcome))),
            imports=_imports(lines),
            classes=classes,
            setup=[*setup, *code.inputs, *start],
            body=code.body,
            check=check,
        )
        require_closed(text)
        return ModuleScript(text, self._tree.num_modules, self._context.program.num_calls)

    # -- the script ----------------------------------------------------------------------------------------------

    def _header(self, num_calls_before: int | None, version: str, outcome: str) -> Iterator[str]:
        what = redact_text(headline(self._context.failure))
        yield f"{what} {phase_words(self._context.failure)}{outcome} (torch {version})."
        was = f"{counted(num_calls_before, 'torch call')} of " if num_calls_before is not None else ""
        yield f"The part of the model that shows how: cut mechanically by reprokit from {was}a training step."
        if not self._context.is_ordinary:
            yield "Not all inputs are ordinary numbers: no piece of the step was found that fails with such alone."
        yield "Ends with exit code 1 while the failure is there, and with 0 once it is gone."

    def _random_start(self) -> list[str] | None:
        """The line that seeds the generator before the one call that is random; ``None`` when there are more."""
        states = [call.mode.rng.value for call in self._context.program.calls if call.mode.rng is not None]
        if not states:
            return []
        seed = seed_of(self._context.tensors[states[0]]) if len(states) == 1 else None
        return None if seed is None else [f"torch.manual_seed({seed})"]

    def _setup(self) -> list[str] | None:
        modules = _children(self._tree.root)
        made = [f"{self._names.attributes[block.key]} = {self._made(block)}" for block in modules]
        changed = self._changed_parameters()
        if changed is None:
            return None
        numbers = (start for value, start in self._start.items() if is_same(start, self._context.tensors[value]))
        needs_seed = any(n.is_floating_point() and n.numel() > 0 and constant_of(n) not in (0, 1) for n in numbers)
        seed = [f"torch.manual_seed({SEED})"] if needs_seed else []
        return [*seed, *(piece for line in made for piece in fold(line)), *changed]

    def _changed_parameters(self) -> list[str] | None:
        lines: list[str] = []
        for block in self._tree.layers():
            for name, value in block.layer.state.items() if block.layer is not None else ():
                tensor = self._context.tensors[value]
                if name == "num_batches_tracked" or is_same(self._start[value].contiguous(), tensor.contiguous()):
                    continue
                path = self._names.value_path(value, ROOT_KEY)
                line = _assignment(path, tensor) if path is not None else None
                if line is None:
                    return None
                lines += fold(line)
        return lines

    def _script_code(self, subject: Subject | None) -> Code:
        root = self._tree.root
        written = {value: _drawn(self._context.tensors[value]) for value in self._context.drawn}
        keep = [] if subject is None else [subject.value]
        program = self._statements(root, ROOT_KEY, self._context.program.inputs, ())
        reserved = {*_RESERVED, *(self._names.attributes[b.key] for b in _children(root)), *self._texts}
        return write_program(
            program,
            self._context.tensors,
            keep=keep,
            given=self._paths(ROOT_KEY),
            written=written,
            nouns=self._nouns,
            reserved=reserved,
        )

    def _paths(self, inside: Key) -> dict[int, str]:
        values = (value for value in self._inputs if value in self._tree.owners or value in self._names.layer_of)
        paths = {value: self._names.value_path(value, inside) for value in values}
        return {value: path for value, path in paths.items() if path is not None}

    # -- classes -------------------------------------------------------------------------------------------------

    def _write_classes(self) -> bool:
        """The classes, innermost first; ``False`` when one keeps a tensor that no short expression makes."""
        for block in reversed(modules_in_order(self._tree.root)):
            if block.layer is not None or is_container(block.scope):
                continue
            own = [self._own_line(value) for value in own_values(self._tree, block.key)]
            if None in own:
                return False
            self._write_class(block, [line for line in own if line is not None])
        return True

    def _own_line(self, value: int) -> str | None:
        tensor, item = self._context.tensors[value], self._inputs[value]
        found = _drawn(tensor) if value in self._context.drawn else literal(tensor)
        if found is None:
            return None
        name = self._names.own[value]
        if item.role == "parameter" and tensor.is_floating_point():
            return f"self.{name} = nn.Parameter({found.text})"
        return f'self.register_buffer("{name}", {found.text})'

    def _write_class(self, block: Block, own: list[str]) -> None:
        children = [f"self.{self._names.attributes[b.key]} = {self._made(b)}" for b in _children(block)]
        body = [*own, *children]
        lines = []
        if body:
            lines += ["    def __init__(self):", "        super().__init__()"]
            lines += [piece for line in body for piece in fold(f"        {line}")]
            lines.append("")
        lines += [f"    {line}" for line in self._body(block, "forward", ("self",))]
        for name in names.numbered(class_name(block.scope.cls)):
            text = [f"class {name}(nn.Module):", *lines]
            if self._texts.setdefault(name, text) == text:
                self._classes[block.key] = name
                return

    def _body(self, block: Block, function: str, first: tuple[str, ...]) -> list[str]:
        arguments = dict(self._argument_names(block))
        program = self._statements(block, block.key, [], block.makes)
        given = {**({} if block.is_function else self._paths(block.key)), **arguments}
        indent = 4 if block.is_function else 8
        code = write_program(
            program, {}, keep=block.makes, given=given, nouns=self._nouns, reserved=_RESERVED, indent=indent
        )
        body = list(code.body)
        returned = ", ".join(code.names[value] for value in block.makes)
        if body and returned and body[-1].startswith(f"{returned} = ") and len(block.makes) == 1:
            shorter = f"return {body[-1].removeprefix(f'{returned} = ')}"
            body[-1:] = fold(shorter, WIDTH - indent)
        elif returned:
            body.append(f"return {returned}")
        head = f"def {function}({', '.join((*first, *arguments.values()))}):"
        return [head, *(f"    {line}" for line in body or ["pass"])]

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

    def _made(self, block: Block) -> str:
        if block.layer is not None:
            layer = block.layer
            arguments = [expression.argument(value, _no_tensor) for value in layer.arguments]
            options = {name: expression.argument(value, _no_tensor) for name, value in layer.options.items()}
            ending = ".eval()" if not layer.training and layer.cls.startswith(_MODE_MATTERS) else ""
            return f"{expression.call(f'nn.{layer.cls}', arguments, options).text}{layer.suffix}{ending}"
        if is_container(block.scope):
            return f"nn.Sequential({', '.join(self._made(child) for child in _children(block))})"
        return f"{self._classes[block.key]}()"


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


def _no_tensor(value: Any) -> Expr:
    raise TypeError(f"a constructor argument cannot be `{type(value).__name__}`")


def _assignment(path: str, tensor: torch.Tensor) -> str | None:
    constant = constant_of(tensor)
    if constant is None:
        numbers = literal(tensor)
        return f"{path}.data = {numbers.text}" if numbers is not None else None
    if constant in (0, 1):
        return f"nn.init.{'ones' if constant else 'zeros'}_({path})"
    return f"nn.init.constant_({path}, {number_text(constant, tensor.dtype)})"


def _drawn(tensor: torch.Tensor) -> Literal:
    sizes = tuple(str(size) for size in tensor.shape)
    dtype = () if tensor.dtype == torch.float32 else (f"dtype={tensor.dtype}",)
    return Literal("randn", (*sizes, *dtype))


def _imports(lines: list[str]) -> list[str]:
    found = ["import torch"]
    if any(re.search(r"\bF\.", line) for line in lines):
        found.append("import torch.nn.functional as F")
    if any(re.search(r"\bnn\.(?!functional)", re.sub(r"torch\.nn\.", "", line)) for line in lines):
        found.append("from torch import nn")
    return found
