"""A fix as code: the lines of the user's program that were changed, as they were when the step became finite.

Each is the user's own statement with only the changed calls written anew: what a loop goes over, attributes and other
numbers stay. Where that is not possible, the statement is written anew from its calls. The comment above each tells
whether the code can stand in the place of the statement."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reprokit.locate.calls import Slot
from reprokit.program.functions import is_in_place
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Call, Mode, Program, Ref, Site, iter_refs
from reprokit.program.statement import ParsedStatement, parsed
from reprokit.render import call_code, expression
from reprokit.render.call_code import Statement, labels
from reprokit.render.code import write_program
from reprokit.render.expression import Expr, Rank
from reprokit.render.gate import is_line
from reprokit.render.names import numbered
from reprokit.render.spelling import (
    MODULES,
    Match,
    is_inside_another,
    match_of,
    operand_nodes,
    operand_paths,
    rank_of,
)
from reprokit.render.statements import OFF, is_one_line

_OPERATIONS = (ast.Attribute, ast.BinOp, ast.Compare, ast.Subscript, ast.UnaryOp)
_NOT_TWICE = (ast.Await, ast.Call, ast.NamedExpr, ast.Yield, ast.YieldFrom)
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)
_PLAIN = (
    *_STATEMENTS, ast.Module, ast.Attribute, ast.BinOp, ast.Call, ast.Compare, ast.Constant, ast.Name, ast.Slice,
    ast.Subscript, ast.UnaryOp, ast.cmpop, ast.expr_context, ast.keyword, ast.operator, ast.unaryop,
)  # fmt: skip
Operands = Mapping[int, ast.expr]
Polish = Callable[[str], str]


class _NotShown(Exception):
    """The line does not show what was changed."""


def own_line(before: Sequence[Call], after: Sequence[Call], polish: Polish) -> str:
    """The statement that ``before`` stands in as it is for ``after``; empty if it has no such form.

    What was not touched is the very same `Call` in both. ``polish`` makes the text of new expressions readable.
    """
    line = parsed(before[0].site.text) if before and before[0].site is not None else None
    if line is None or _has(line.tree, (ast.JoinedStr,)):  # parts of these have no exact places before Python 3.12
        return ""
    try:
        return line.restored(_Line(line, before, after, polish).text(line.tree))
    except _NotShown:
        return ""


class _Line:
    def __init__(self, line: ParsedStatement, before: Sequence[Call], after: Sequence[Call], polish: Polish) -> None:
        self._source, self._polish = line.body.encode(), polish
        self._starts = [0, *itertools.accumulate(map(len, self._source.splitlines(keepends=True)))]
        self._writes_in_place = any(is_in_place(call.target) for call in before)
        kept, old = set(map(id, after)), set(map(id, before))
        self._replaced = [call for call in before if id(call) not in kept]
        self._new = [call for call in after if id(call) not in old]
        parts = (match_of(call) for call in before if id(call) in kept)
        self._untouched = [part[0] for part in parts if part is not None]  # in other turns of a loop also changed parts
        self._makers = {call.outputs.value: call for call in self._new
                        if isinstance(call.outputs, Ref) and call.outputs.value not in call.input_refs()}  # fmt: skip
        self._roots: dict[tuple[int, ...], list[Call]] = {}
        for call in self._new:
            self._roots.setdefault(call.output_refs(), []).append(call)
        self._operands: dict[int, ast.expr] = {}
        for call in before:
            for value, node in operand_nodes(call).items():
                self._operands.setdefault(value, node)
        self._used = set[int]()
        self._changed: dict[ast.AST, Expr] = {}

    def text(self, tree: ast.Module) -> str:
        """The line after the change, without a comment behind it."""
        for call in self._replaced:  # in the order of their evaluation, so what stands inside another comes first
            node, text = self._part(call)[0], self._replacement(call)
            if self._changed.setdefault(node, text) != text:
                raise _NotShown  # a loop whose turns were changed in different ways
        if self._used != set(map(id, self._new)) or any(node in self._changed for node in self._untouched):
            raise _NotShown
        return self._spliced(tree, self._changed, 0, self._span(tree.body[-1])[1])

    def _part(self, call: Call) -> Match:
        match = match_of(call)
        if match is None:
            raise _NotShown
        return match

    # -- what is new ---------------------------------------------------------------------------------------------

    def _replacement(self, call: Call) -> Expr:
        """The expression in the place of a call."""
        made = self._roots.get(call.output_refs(), [])
        if not made or (len(made) > 1 and not call.output_refs()):
            raise _NotShown
        operands, used = operand_nodes(call), list[Call]()
        text = self._written(made[-1], call, operands, used)
        self._used |= set(map(id, used))
        reads = Counter(ref.value for new in used for ref in iter_refs((new.args, new.kwargs)))
        twice = [value for value, count in reads.items() if count > 1]
        if any(value in self._makers or _has(self._operand(value, operands), _NOT_TWICE) for value in twice):
            raise _NotShown
        return text

    def _written(self, new: Call, call: Call, operands: Operands, used: list[Call]) -> Expr:
        """A new call in the place of an old one, in the user's words where only its arguments are others."""

        def leaf(value: Any) -> Expr:
            maker = self._makers.get(value.value) if value != call.outputs else None
            if maker is not None:
                return self._written(maker, call, operands, used)
            return self._shown(self._operand(value.value, operands))

        if not any(other is new for other in used):
            used.append(new)
        if replace(new.mode, rng=None) != replace(call.mode, rng=None):
            raise _NotShown
        own = self._with_arguments(new, call, leaf) if new.target == call.target else None
        written = own or call_code.write_call(new, leaf)
        if isinstance(written, Statement):
            raise _NotShown
        return written if own is not None else Expr(self._polish(written.text), written.rank)

    def _operand(self, value: int, operands: Operands) -> ast.expr:
        """The part of the line for a value that is not new."""
        node = operands.get(value) or (None if self._writes_in_place else self._operands.get(value))
        if node is None:
            raise _NotShown
        return node

    def _with_arguments(self, new: Call, call: Call, leaf: Callable[[Any], Expr]) -> Expr | None:
        """The user's words for a call with other arguments; ``None`` where these have no place in them."""
        node, given = self._part(call)
        keywords = {item.arg: item.value for item in node.keywords} if isinstance(node, ast.Call) else {}
        nodes: dict[Any, ast.expr] = {**keywords}
        nodes.update(enumerate(given))
        old, wanted = _slots(call), _slots(new)
        other = {slot: value for slot, value in wanted.items() if slot not in old or value != old[slot]}
        added = {slot: value for slot, value in other.items() if slot not in old}
        if old.keys() - wanted.keys() or not (other.keys() - added.keys()) <= nodes.keys():
            return None
        if added and not (isinstance(node, ast.Call) and all(isinstance(slot, str) for slot in added)):
            return None
        texts = {slot: expression.argument(value, leaf) for slot, value in other.items()}
        texts = {slot: Expr(self._polish(text.text), text.rank) for slot, text in texts.items()}
        replaced: dict[ast.AST, Expr] = {nodes[slot]: text for slot, text in texts.items() if slot not in added}
        text = self._spliced(node, {**self._changed, **replaced}, *self._span(node))
        for slot in added:
            text = f"{text[:-1].rstrip(', ')}{', ' * (not text.endswith('()'))}{slot}={texts[slot]})"
        return Expr(text, rank_of(node))

    # -- what stays ----------------------------------------------------------------------------------------------

    def _shown(self, node: ast.expr) -> Expr:
        """A part of the line with the changes inside it."""
        return self._changed.get(node) or Expr(self._spliced(node, self._changed, *self._span(node)), rank_of(node))

    def _spliced(self, node: ast.AST, replaced: Mapping[ast.AST, Expr], start: int, end: int) -> str:
        """The text from ``start`` to ``end``, with parts of ``node`` replaced."""
        pieces, position = list[bytes](), start
        for first, last, text in self._pieces(node, replaced):
            pieces += [self._source[position:first], text.encode()]
            position = last
        return b"".join((*pieces, self._source[position:end])).decode()

    def _pieces(self, node: ast.AST, replaced: Mapping[ast.AST, Expr]) -> Iterator[tuple[int, int, str]]:
        """The spans of the outermost replaced parts, with their new text."""
        found = list[tuple[int, int, str]]()
        for child in ast.iter_child_nodes(node):
            if child in replaced:
                found.append(self._fitted(child, isinstance(node, _OPERATIONS), replaced[child]))
            else:
                found += self._pieces(child, replaced)
        return iter(sorted(found))

    def _fitted(self, node: ast.AST, is_operand: bool, new: Expr) -> tuple[int, int, str]:
        """The span of a part and its new text, with the parentheses that it needs."""
        start, end = self._span(node)
        if not is_operand:
            return start, end, new.text
        if self._source[start - 1 : start] != b"(" or self._source[end : end + 1] != b")":
            return start, end, new.at_least(rank_of(node))
        return (start - 1, end + 1, new.text) if new.rank is Rank.ATOM else (start, end, new.text)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt)), "only these are replaced"
        assert node.end_col_offset is not None, "a tree that was parsed has places"
        start, end = (self._starts[(line or 1) - 1] for line in (node.lineno, node.end_lineno))
        return start + node.col_offset, end + node.end_col_offset


def _slots(call: Call) -> dict[Slot, Any]:
    """All arguments by position or name."""
    found: dict[Slot, Any] = dict(enumerate(call.args))
    found.update(call.kwargs.items())
    return found


def _has(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(inner, kinds) for inner in ast.walk(node))


def stands_for(text: str, code: str) -> bool:
    """True if statements written anew do what a statement does, with the same variables and nothing besides."""
    line = parsed(code)
    if line is None or len(line.tree.body) != 1 or not isinstance(line.tree.body[0], _STATEMENTS):
        return False
    try:
        new = ast.parse(text)
    except SyntaxError:
        return False
    names, new_names = _names(line.tree), _names(new)
    made = _names(new, ast.Store)
    returns = isinstance(line.tree.body[0], ast.Return) == isinstance(new.body[-1], ast.Return) if new.body else False
    return (
        returns
        and all(isinstance(node, _PLAIN) for node in ast.walk(line.tree))
        and names <= new_names <= names | made
        and _names(line.tree, ast.Store) <= made
    )


def _names(tree: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """The names in some code, less those of torch's modules."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    return found - MODULES


MAX_LINES = 6  # for one statement of the user's code; the changed calls alone are shown where it takes more
_LAYER = re.compile(r"\.(\d+)(?=\.|$)")
_NUMBER = re.compile(r"-?\d[\d.]*e[-+]?\d+")
_LIMITS = {
    repr(float(getattr(torch.finfo(dtype), name))).replace("e+", "e"): f"torch.finfo({dtype}).{name}"
    for dtype in (torch.bfloat16, torch.float64, torch.float32)
    for name in ("min", "max", "tiny")
}


def fix_code(before: Program, after: Program, tensors: Tensors) -> str:
    """The changed lines of a step, each below a comment with its place; empty when there is nothing to show.

    ``before`` and ``after`` share the calls that were not touched.
    """
    untouched = {id(call) for call in before.calls}
    changed = [index for index, call in enumerate(after.calls) if id(call) not in untouched]
    shown: dict[tuple[str, int], str] = {}  # by file and first line
    for index in changed:
        site = after.calls[index].site
        if site is None or (site.file, site.first_line) in shown or after.calls[index].is_optimizer_step:
            continue
        text, place = _Piece(before, after, tensors, frozenset(changed), index).shown(site)
        shown[site.file, site.first_line] = f"# {place}\n{text}" if text and is_line(text) else ""
    return "\n".join(filter(None, shown.values()))


@dataclass(frozen=True)
class _Piece:
    """The statement of the user's that call number ``index`` of the edited program stands in."""

    before: Program
    after: Program
    tensors: Tensors
    changed: frozenset[int]
    index: int

    def shown(self, site: Site) -> tuple[str, str]:
        """The code, empty where it is long, and where it belongs.

        That is ``train.py:7`` or ``train.py:7-9`` for what can stand in the place of these lines, ``in train.py:7`` for
        the changed calls alone; ``in what it calls`` if these are in a function that the statement calls.
        """
        own = own_line(_on_line(self.before, site), _on_line(self.after, site), _in_words)
        if own:
            return own, site.statement_place
        line = self._line()
        whole = self._written(line)
        if len(whole) <= MAX_LINES and stands_for("\n".join(whole), site.text):
            return "\n".join(whole), site.statement_place
        kept = set(map(id, self.after.calls))
        replaced = [call for call in self._old() if id(call) not in kept]
        is_inside = bool(replaced) and all(map(is_inside_another, replaced))
        alone = self._written([number for number in line if number in self.changed])
        found = next((lines for lines in (whole, alone) if len(lines) <= MAX_LINES), [])
        return "\n".join(found), f"{site.place}, in what it calls" if is_inside else f"in {site.place}"

    def _old(self) -> list[Call]:
        """The calls of the line before the change."""
        return [call for call in self.before.calls if is_one_line(call, self.after.calls[self.index])]

    def _line(self) -> Sequence[int]:
        """The numbers of the calls on the line, once where a loop goes over it several times."""
        calls, first, last = self.after.calls, self.index, self.index
        while first > 0 and is_one_line(calls[first - 1], calls[self.index]):
            first -= 1
        while last + 1 < len(calls) and is_one_line(calls[last + 1], calls[self.index]):
            last += 1
        numbers = range(first, last + 1)
        targets = [calls[number].target for number in numbers]
        length = next(n for n in range(1, len(targets) + 1) if targets == targets[:n] * (len(targets) // n))
        return numbers[:length]

    def _in_its_place(self, calls: Sequence[Call]) -> list[Call]:
        """The calls without modes that are set around the line; an autocast switched off by the change is written."""
        around = next((call.mode.autocast for call in self._old()), ())
        off = tuple((device, OFF) for device, _ in around)
        return [replace(call, mode=Mode(autocast=() if call.mode.autocast else off)) for call in calls]

    def _written(self, numbers: Sequence[int]) -> list[str]:
        """Some calls of the line as code that stands in its place."""
        written = set(numbers)
        outside = [call for number, call in enumerate(self.after.calls) if number not in written]
        read = {ref.value for ref in self.after.outputs} | {value for call in outside for value in call.input_refs()}
        calls = _needed(self._in_its_place([self.after.calls[number] for number in numbers]), read)
        given, made = dict[int, str](), set[int]()
        paths, known = self._paths(), {**labels(self.after), **labels(self.before)}
        for call in calls:
            for value in call.input_refs():
                if value not in made and value not in given:
                    given[value] = _unique([paths.get(value), _path(known[value])], set(given.values()))
            made.update(call.output_refs())
        kept = [value for value in made if value in read]
        piece = replace(self.after, inputs=(), calls=tuple(calls), outputs=())
        inserted = dict.fromkeys((value for value in made if value >= self.before.next_value()), "")
        nouns = {**inserted, **{value: known[value] for value in kept}}
        lines = write_program(piece, self.tensors, keep=[*kept, *(read & given.keys())], given=given, nouns=nouns).body
        return [_in_words(line) for line in self._returned(lines, calls)]

    def _returned(self, lines: Sequence[str], calls: Sequence[Call]) -> Sequence[str]:
        """The lines, with ``return`` where the user's line returns what the last of them makes."""
        last = calls[-1] if lines else None
        if last is None or last.site is None or not last.site.text.startswith("return "):
            return lines
        if any(value in call.input_refs() for call in _on_line(self.after, last.site) for value in last.output_refs()):
            return lines
        return [*lines[:-1], re.sub(r"^\w+ = ", "return ", lines[-1])]

    def _paths(self) -> Mapping[int, str]:
        """The paths of the values that the line reads."""
        return operand_paths(self._old())


def _on_line(program: Program, site: Site) -> list[Call]:
    """All calls of a statement, those of functions that it holds (a comprehension) and of all its runs included."""
    sites = ((call, call.site) for call in program.calls)
    place = (site.file, site.first_line)
    return [call for call, its in sites if its is not None and (its.file, its.first_line) == place]


def _path(name: str) -> str:
    """The name of a parameter as an expression: layers in lists are indexed."""
    return _LAYER.sub(r"[\1]", name)


def _unique(wanted: Sequence[str | None], taken: Container[str]) -> str:
    """The first name that is not taken, or the last one with a number."""
    names = itertools.chain(wanted[:-1], numbered(wanted[-1] or "x"))
    return next(name for name in names if name is not None and name not in taken)


def _needed(calls: Sequence[Call], read: set[int]) -> list[Call]:
    """The calls without those that nothing reads any more."""
    wanted, needed = set(read), list[Call]()
    for call in reversed(calls):
        writes = set(call.output_refs())
        if writes & wanted or not writes or writes & set(call.input_refs()):
            needed.append(call)
            wanted |= set(call.input_refs())
    return needed[::-1]


def _in_words(code: str) -> str:
    """Code in which the limits of dtypes go by their names."""
    return _NUMBER.sub(lambda number: _LIMITS.get(number[0], number[0]), code)
