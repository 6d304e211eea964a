"""Which statements of a script were edited since a capture, and which other statements an edit can act on.

An edit acts on what reads the names that it writes, on what stands behind a condition that it acts on, and on the
functions that it calls. Names are followed through the text of all files: variables by function, attributes, keywords
and words by themselves. That is generous: `Edits` says what an edit may explain, never that it does.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

from reprokit.program.code_lines import CodeDigests, line_digests, read_text
from reprokit.program.ir import Site

Spans = Mapping[str, Collection[range]]  # lines of files
Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_CALLS_MODULE = frozenset({"forward", "__call__"})
# What makes a tensor of numbers of Python or NumPy: an input of the step, as a batch is.
_MAKES_TENSOR = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "Tensor", "FloatTensor", "LongTensor"})
_JUMPS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(eq=False)
class _Statement:
    """A statement: the ``lines`` of its own (of a compound one its head), what it reads, writes and calls."""

    node: ast.stmt
    lines: range
    around: tuple[_Statement, ...]  # compound statements, the outermost first
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)

    @property
    def function(self) -> _Statement | None:
        """The definition of the function that the statement is in."""
        return next((one for one in reversed(self.around) if isinstance(one.node, _FUNCTIONS)), None)


class _File:
    """A file as it was and as it is: lines that are still there, and the statements of now."""

    def __init__(self, name: str, text: str, old: Sequence[int | str], *, is_python: bool) -> None:
        self.name = name
        is_text = any(isinstance(row, str) for row in old)
        new: Sequence[int | str] = line_digests(text, is_python=is_python)
        if is_text:
            new = [line.strip() for line in text.splitlines()]
        mine = [(at + 1, digest) for at, digest in enumerate(old) if digest]
        others = [(at + 1, digest) for at, digest in enumerate(new) if digest]
        self.moved: dict[int, int] = {}  # lines of then by the lines of now
        self.deleted_before: set[int] = set()  # lines of now, in front of which lines were taken out
        self.edited = {line for line, _ in others}
        matcher = SequenceMatcher(None, [one for _, one in mine], [one for _, one in others], autojunk=False)
        end, end_other = 0, 0
        for start, start_other, size in matcher.get_matching_blocks():
            if start > end and start_other == end_other and size:
                self.deleted_before.add(others[start_other][0])
            for offset in range(size):
                self.moved[mine[start + offset][0]] = others[start_other + offset][0]
            end, end_other = start + size, start_other + size
        self.edited -= set(self.moved.values())
        self.removed = {line for line, _ in mine} - self.moved.keys()
        self.statements = list(_statements(name, text)) if is_python else []
        self.by_line = {line: one for one in self.statements for line in one.lines}

    @property
    def is_edited(self) -> bool:
        return bool(self.edited or self.removed)

    @functools.cached_property
    def places(self) -> list[int]:
        """The lines of now that were edited, or behind which one was taken out."""
        found = set(self.edited)
        for line in self.removed:
            before = max((old for old in self.moved if old < line), default=None)
            found.add(self.moved[before] if before is not None else 1)
        return sorted(found)


class Edits:
    """What was edited in the files of a capture, and what that can act on.

    ``acts_everywhere``: a setting outside of the code was changed, and nothing says what reads it. It may be behind
    another call or number, never behind another tensor. ``is_known``: there are digests of all lines; of an older
    capture only the lines of its calls are known, and all others pass for edited.
    """

    def __init__(
        self,
        captured: CodeDigests | None,
        sites: Collection[Site],
        files: Mapping[str, Path],
        words: tuple[Sequence[str], Sequence[str]],
        executed: Mapping[str, Set[int]] | None = None,
    ) -> None:
        """``sites`` are those of the captured calls, ``files`` those of the script that runs now, itself first.

        ``words`` are the command lines of then and now. ``executed`` are the lines of edited files that have run, if
        they are known.
        """
        self._executed = executed
        self.is_known = captured is not None
        known: Mapping[str, Sequence[int | str]] = captured if captured is not None else _lines_of(sites)
        self._files: dict[str, _File] = {}
        pairs = _paired(known, files)
        new = {name: path for name, path in files.items() if name not in pairs.values()}
        self._names = pairs
        self.acts_everywhere = words[0][1:] != words[1][1:]
        for old, name in pairs.items():
            path = files[name]
            text = read_text(path)
            if text is not None:
                is_python = path.suffix == ".py"
                self._files[name] = _File(name, text, known[old], is_python=is_python)
                self.acts_everywhere |= not is_python and self._files[name].is_edited
        for name, path in new.items():
            text = read_text(path)
            if text is not None and path.suffix == ".py":
                self._files[name] = _File(name, text, (), is_python=True)
        self.is_any = self.acts_everywhere or any(file.is_edited for file in self._files.values())

    def line_of(self, site: Site) -> tuple[str, int] | None:
        """Where a line of then is now; ``None`` if it was edited or taken out."""
        name = self._names.get(site.file, site.file)
        file = self._files.get(name)
        if file is None:
            return name, site.line
        line = file.moved.get(site.line)
        return (name, line) if line is not None else None

    def is_edited(self, site: Site) -> bool:
        """True if the statement of a site of now was edited."""
        statement = self._statement(site)
        file = self._files.get(site.file)
        if file is None:
            return False
        lines = statement.lines if statement is not None else range(site.line, site.line + 1)
        return not file.edited.isdisjoint(lines)

    def acts_on(self, site: Site | None) -> bool:
        """True if an edit may act on the statement of a site of now: on what it reads, or on whether it runs."""
        if self.acts_everywhere:
            return True
        if site is None:
            return False
        statement = self._statement(site)
        if statement is None:
            return self.is_edited(site)
        return id(statement) in self._all_acted_on()

    def stands_in(self, site: Site, reached: Collection[Site]) -> bool:
        """True if an edited statement decides about the line of a site of then, and is itself ``reached`` by the step:
        a jump in front of that line, or a condition around it. No names are followed."""
        name = self._names.get(site.file, site.file)
        file = self._files.get(name)
        now = file.moved.get(site.line) if file is not None and self.is_known else None
        if file is None or now is None:
            return False
        edited = {self._statement(one) for one in reached if self.is_edited(one)}
        decided = [inner for one in edited if one is not None for inner in self._acting.controlled_by(one)]
        return file.by_line.get(now) in decided

    def makes(self, name: str, site: Site | None) -> bool:
        """True if an edit may act on what a tensor is made of, that a statement of now makes and reads, or reads by a
        name: numbers of Python or NumPy, such as weights of classes. An input may have no name, which is empty."""
        reader = self._statement(site) if site is not None else None
        if reader is None:
            return False
        names = {key.rpartition(":")[2].lstrip(".") for key in self._made}
        is_maker = id(reader) in self._all_acted_on() and not _MAKES_TENSOR.isdisjoint(reader.calls)
        return is_maker or (name in names if name else not reader.reads.isdisjoint(self._made))

    @functools.cached_property
    def _made(self) -> set[str]:
        """What statements write that edits act on and that make tensors, and what is written of their results."""
        acted = self._all_acted_on()
        left = [one for file in self._files.values() for one in file.statements if id(one) in acted]
        made = set().union(*(one.writes for one in left if not _MAKES_TENSOR.isdisjoint(one.calls)))
        num_before = -1
        while num_before != len(made):
            num_before = len(made)
            results = {key for key in made if key.endswith("()") and key != "forward()"}
            for one in left:
                if not results.isdisjoint(one.reads):
                    made |= one.writes
        return made

    def are_within(self, spans: Spans) -> bool:
        """True if all edits are in these lines of the files of now, and there is one."""
        if self.acts_everywhere or not self.is_any:
            return False
        edited = [(one, line) for one in self._files.values() for line in one.places]
        return bool(edited) and all(any(n in span for span in spans.get(one.name, ())) for one, n in edited)

    @property
    def first_place(self) -> str:
        """``data.py:7``, of the first edited line."""
        edited = (file for file in self._files.values() if file.is_edited)
        found = (f"{file.name}:{min(file.edited or file.places)}" for file in edited)
        return next(found, "")

    def _statement(self, site: Site) -> _Statement | None:
        file = self._files.get(site.file)
        return file.by_line.get(site.line) if file is not None else None

    def _all_acted_on(self) -> set[int]:
        return self._acting.found

    @functools.cached_property
    def _acting(self) -> _Acting:
        return _Acting(self._files, self._executed)


def _lines_of(sites: Collection[Site]) -> dict[str, list[int | str]]:
    """The lines of some sites by file, and nothing for all others; the file with the outermost code first."""
    found: dict[str, list[int | str]] = {}
    for site in sorted(sites, key=lambda one: one.function != "<module>"):
        rows = found.setdefault(site.file, [])
        rows.extend([""] * (site.line - len(rows)))
        rows[site.line - 1] = site.code.strip()
    return found


def _paired(captured: Mapping[str, Sequence[int | str]], files: Mapping[str, Path]) -> dict[str, str]:
    """The files of now by the names of then: of the same name, and the script that has another one."""
    pairs = {name: name for name in captured if name in files}
    main, own = next(iter(captured), None), next(iter(files), None)
    if main is not None and own is not None and main not in pairs and own not in pairs.values():
        pairs[main] = own
    return pairs


# -- statements ------------------------------------------------------------------------------------------------------


def _statements(name: str, text: str) -> Iterator[_Statement]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    yield from _inside(name, tree.body, (), _Scope(f"{name}:", set()))


@dataclass(frozen=True)
class _Scope:
    """A function, with the variables that are its own; of a module: none is."""

    prefix: str
    own: set[str]

    def key(self, name: str) -> str:
        """A variable by its function if it is one of the function's own, else by itself."""
        return f"{self.prefix}{name}" if name in self.own else f".{name}"


def _inside(file: str, body: Sequence[ast.stmt], around: tuple[_Statement, ...], scope: _Scope) -> Iterator[_Statement]:
    for node in body:
        parts = [part for part in ast.iter_child_nodes(node) if not _is_body(part)]
        statement = _Statement(node, _head(node), around)
        inner = scope
        if isinstance(node, _FUNCTIONS):
            inner = _scope_of(node, scope)
            statement.writes |= {f".{node.name}", *(inner.key(name) for name in _parameters(node))}
        elif isinstance(node, ast.ClassDef):
            statement.writes.add(f".{node.name}")
        for part in parts:
            _read_names(part, statement, scope)
        _note_effects(node, statement, scope)
        yield statement
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            for part in getattr(node, name, ()):
                nested = [part] if isinstance(part, ast.stmt) else part.body
                yield from _inside(file, nested, (*around, statement), inner)


def _is_body(part: ast.AST) -> bool:
    return isinstance(part, (ast.stmt, ast.ExceptHandler, ast.match_case))


def _head(node: ast.stmt) -> range:
    """The lines of a statement, of a compound one those up to its body."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if not body or isinstance(node, ast.Expr):
        return range(first, (node.end_lineno or node.lineno) + 1)
    begin = body[0].pattern.lineno if isinstance(body[0], ast.match_case) else body[0].lineno
    return range(first, max(first + 1, begin))


def _parameters(node: Function) -> list[str]:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [one.arg for one in named if one is not None]


def _scope_of(node: Function, outer: _Scope) -> _Scope:
    own = set(_parameters(node))
    shared = set[str]()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            own.add(part.id)
        elif isinstance(part, (ast.Global, ast.Nonlocal)):
            shared.update(part.names)
    return _Scope(f"{outer.prefix}{node.name}:", own - shared)


def _read_names(part: ast.AST, statement: _Statement, scope: _Scope) -> None:
    """Note the names of an expression: variables, attributes, keywords and short words."""
    for node in ast.walk(part):
        if isinstance(node, ast.Name):
            (statement.writes if isinstance(node.ctx, ast.Store) else statement.reads).add(scope.key(node.id))
        elif isinstance(node, ast.Attribute):
            (statement.writes if isinstance(node.ctx, ast.Store) else statement.reads).add(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
            word = node.value.lstrip("-").replace("-", "_")
            if word.isidentifier():
                statement.reads.add(f".{word}")
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, (ast.Name, ast.Attribute)):
                statement.calls.add(called.id if isinstance(called, ast.Name) else called.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            statement.writes |= set(_roots(node.value, scope))


def _note_effects(node: ast.stmt, statement: _Statement, scope: _Scope) -> None:
    """Note what else a statement writes: what it returns, what its calls may write, what it is given by keyword."""
    function = statement.function
    if isinstance(node, ast.Return) and function is not None and isinstance(function.node, _FUNCTIONS):
        statement.writes.add(_result_of(function.node.name))
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        statement.writes |= {f".{(one.asname or one.name).partition('.')[0]}" for one in node.names}
        statement.reads |= {f".{one.name}" for one in node.names}
    if isinstance(node, ast.AugAssign):
        statement.reads |= set(_roots(node.target, scope))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        is_print = isinstance(called, ast.Name) and called.id == "print"  # writes nothing that a step reads
        if not is_print:
            given = [*node.value.args, *(called.value for called in [called] if isinstance(called, ast.Attribute))]
            for one in given:
                statement.writes |= set(_roots(one, scope))
    is_effect = isinstance(node, (ast.Expr, *_FUNCTIONS))
    decorated = getattr(node, "decorator_list", None)  # of a definition these run, its body runs later
    parts = [node] if decorated is None else decorated
    for part in (inner for one in parts for inner in ast.walk(one)):
        if isinstance(part, ast.Call):
            statement.writes |= {f".{one.arg}" for one in part.keywords if one.arg and isinstance(node, ast.Assign)}
            # `parser.add_argument("--rate")`, `options.setdefault("rate", 1)`, `@click.option("--rate")`
            words = [one.value for one in part.args if isinstance(one, ast.Constant)] if is_effect else []
            names = (word.lstrip("-").replace("-", "_") for word in words if isinstance(word, str))
            statement.writes |= {f".{name}" for name in names}
        elif isinstance(part, ast.Dict) and isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return)):
            keys = (key.value for key in part.keys if isinstance(key, ast.Constant))
            statement.writes |= {f".{key}" for key in keys if isinstance(key, str)}
    statement.reads |= {_result_of(name) for name in statement.calls}


def _result_of(function: str) -> str:
    return "forward()" if function in _CALLS_MODULE else f"{function}()"


def _roots(node: ast.AST, scope: _Scope) -> Iterator[str]:
    """``x`` of ``x[3]``, and ``count`` of ``self.count``."""
    while isinstance(node, (ast.Subscript, ast.Starred)):
        node = node.value
    if isinstance(node, ast.Name):
        yield scope.key(node.id)
    elif isinstance(node, ast.Attribute):
        yield f".{node.attr}"


# -- what edits act on -----------------------------------------------------------------------------------------------


class _Acting:
    """Finds the statements that edits act on, until nothing new is found.

    Only an edited statement that has run acts on others, and it does so through statements that have run. What an
    edited condition decides about is acted on also if it has not run.
    """

    def __init__(self, files: Mapping[str, _File], executed: Mapping[str, Set[int]] | None) -> None:
        self.found: set[int] = set()
        self._written = set[str]()
        self._idle = set[int]()  # statements that have not run
        for file in files.values():
            lines = executed.get(file.name) if executed is not None else None
            if lines is not None:
                self._idle.update(id(one) for one in file.statements if lines.isdisjoint(one.lines))
        self._statements = [one for file in files.values() for one in file.statements]
        self._functions: dict[str, list[_Statement]] = {}
        self._members: dict[int, list[_Statement]] = {}
        for one in self._statements:
            if isinstance(one.node, _FUNCTIONS):
                for name in self._names_of(one, one.node):
                    self._functions.setdefault(name, []).append(one)
            for outer in one.around:
                self._members.setdefault(id(outer), []).append(one)
        for one in self._statements:  # what is called by another name may be a module
            if not one.calls <= self._functions.keys():
                one.reads.add("forward()")
        edited = [one for file in files.values() for one in self._edited_in(file)]
        for statement in edited:
            if id(statement) not in self._idle:
                self._act_on(statement, is_anew=True)
        self._follow_names()

    @staticmethod
    def _names_of(statement: _Statement, node: Function) -> list[str]:
        """What a function is called by; ``__init__`` by its class, ``forward`` by whatever holds the module."""
        if node.name == "__init__":
            return [one.node.name for one in statement.around[-1:] if isinstance(one.node, ast.ClassDef)]
        return ["forward()"] if node.name in _CALLS_MODULE else [node.name]

    def _edited_in(self, file: _File) -> Iterator[_Statement]:
        known = set[int]()
        for statement in file.statements:
            if not file.edited.isdisjoint(statement.lines):
                known.update(statement.lines)
                yield statement
        for line in file.edited - known:  # such as an `else:`, which belongs to the statement around
            around = [one for one in file.statements if one.node.lineno <= line <= (one.node.end_lineno or 0)]
            yield from around[-1:]
        for line in file.deleted_before:  # nothing says what the deleted lines wrote: all that follows in their block
            first = file.by_line.get(line)
            if first is not None:
                block = first.around
                yield from (one for one in file.statements if one.around == block and one.node.lineno >= line)

    def _follow_names(self) -> None:
        num_before = -1
        while num_before != len(self.found):
            num_before = len(self.found)
            for statement in self._statements:
                if id(statement) in self.found:
                    continue
                if not self._written.isdisjoint(statement.reads):
                    self._act_on(statement)

    def _act_on(self, statement: _Statement, *, is_anew: bool = False) -> None:
        """Note a statement and all that follows from it. ``is_anew``: it may make calls that were not made before."""
        stack = [(statement, is_anew)]
        while stack:
            one, is_new = stack.pop()
            is_known = id(one) in self.found
            if is_known and not is_new:
                continue
            self.found.add(id(one))
            if not is_known:
                stack += [(inner, True) for inner in self.controlled_by(one)]
            if id(one) in self._idle and not is_new:  # one behind an edited condition may have run then
                continue
            self._written |= one.writes
            for called in one.calls:
                known = self._functions.get(called) or self._functions.get("forward()", [])
                for function in known:
                    if isinstance(function.node, _FUNCTIONS):
                        self._written |= {key for key in function.writes if not key.startswith(".")}
                    if is_new:
                        stack += [(m, True) for m in self._members.get(id(function), []) if id(m) not in self.found]

    def controlled_by(self, statement: _Statement) -> Iterator[_Statement]:
        """The statements that run or do not run by a statement: its body, and what follows a jump in it."""
        node = statement.node
        if isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)):
            yield from self._members.get(id(statement), [])
        if isinstance(node, _JUMPS):
            is_loop_jump = isinstance(node, (ast.Continue, ast.Break))
            kinds = _LOOPS if is_loop_jump else _FUNCTIONS
            left = next((one for one in reversed(statement.around) if isinstance(one.node, kinds)), None)
            members = self._members.get(id(left), []) if left is not None else []
            yield from (one for one in members if one.node.lineno > node.lineno)
