"""A line of the user's code in which only the calls that were changed are written anew.

Everything else stays as the user wrote it: what a loop goes over, what is appended where, attributes, other numbers. So
what comes out can stand in the place of the line. Where the line does not show a changed call, or where the change is
no expression, nothing is written.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reprokit.locate.calls import Slot
from reprokit.program.functions import is_in_place
from reprokit.program.ir import Call, Ref, iter_refs
from reprokit.render import calls, expression
from reprokit.render.calls import Statement
from reprokit.render.expression import Expr, Rank
from reprokit.render.spelling import MODULES, Match, parsed_line, parts_of, rank_of

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
    """The line that ``before`` stands on as it is for ``after``; empty if it has no such form.

    What was not touched is the very same `Call` in both. ``polish`` makes the text of new expressions readable.
    """
    line = parsed_line(before[0].site.code) if before and before[0].site is not None else None
    if line is None or "\n" in line.body or _has(line.tree, (ast.JoinedStr,)):  # parts of these have no exact places
        return ""
    try:
        return line.restored(_Line(line.body, before, after, polish).text(line.tree))
    except _NotShown:
        return ""


class _Line:
    def __init__(self, body: str, before: Sequence[Call], after: Sequence[Call], polish: Polish) -> None:
        self._source, self._polish = body.encode(), polish
        self._parts = dict(zip(map(id, before), parts_of(before), strict=True))
        self._writes_in_place = any(is_in_place(call.target) for call in before)
        kept, old = set(map(id, after)), set(map(id, before))
        self._replaced = [call for call in before if id(call) not in kept]
        self._new = [call for call in after if id(call) not in old]
        parts = (self._parts[id(call)] for call in before if id(call) in kept)
        self._untouched = [part[0] for part in parts if part is not None]  # in other turns of a loop also changed parts
        self._makers = {call.outputs.value: call for call in self._new
                        if isinstance(call.outputs, Ref) and call.outputs.value not in call.input_refs()}  # fmt: skip
        self._roots: dict[tuple[int, ...], list[Call]] = {}
        for call in self._new:
            self._roots.setdefault(call.output_refs(), []).append(call)
        self._operands: dict[int, ast.expr] = {}
        for call in before:
            for value, node in _operands(call, self._parts[id(call)]).items():
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
        match = self._parts[id(call)]
        if match is None:
            raise _NotShown
        return match

    # -- what is new ---------------------------------------------------------------------------------------------

    def _replacement(self, call: Call) -> Expr:
        """What stands in the place of a call."""
        made = self._roots.get(call.output_refs(), [])
        if not made or (len(made) > 1 and not call.output_refs()):
            raise _NotShown
        operands, used = _operands(call, self._part(call)), list[Call]()
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
        written = own or calls.write_call(new, leaf)
        if isinstance(written, Statement):
            raise _NotShown
        return written if own is not None else Expr(self._polish(written.text), written.rank)

    def _operand(self, value: int, operands: Operands) -> ast.expr:
        """The part of the line that says a value which is not new."""
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
        """Where in the text the outermost of the replaced parts stand, and what comes there."""
        found = list[tuple[int, int, str]]()
        for child in ast.iter_child_nodes(node):
            if child in replaced:
                found.append(self._fitted(child, isinstance(node, _OPERATIONS), replaced[child]))
            else:
                found += self._pieces(child, replaced)
        return iter(sorted(found))

    def _fitted(self, node: ast.AST, is_operand: bool, new: Expr) -> tuple[int, int, str]:
        """Where a part stands and what comes there, with the parentheses that it needs."""
        start, end = self._span(node)
        if not is_operand:
            return start, end, new.text
        if self._source[start - 1 : start] != b"(" or self._source[end : end + 1] != b")":
            return start, end, new.at_least(rank_of(node))
        return (start - 1, end + 1, new.text) if new.rank is Rank.ATOM else (start, end, new.text)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt)), "only these are replaced"
        assert node.end_col_offset is not None, "a tree that was parsed has places"
        return node.col_offset, node.end_col_offset


def _operands(call: Call, match: Match | None) -> dict[int, ast.expr]:
    """The parts of the line that a call reads its values from."""
    if match is None:
        return {}
    node, given = match
    keywords = {item.arg: item.value for item in node.keywords} if isinstance(node, ast.Call) else {}
    named = [(value, keywords[name]) for name, value in call.kwargs.items() if name in keywords]
    pairs = [*named, *zip(call.args, given, strict=False)]
    return {value.value: part for value, part in reversed(pairs) if isinstance(value, Ref)}


def _slots(call: Call) -> dict[Slot, Any]:
    """All arguments by position or name."""
    found: dict[Slot, Any] = dict(enumerate(call.args))
    found.update(call.kwargs.items())
    return found


def _has(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(inner, kinds) for inner in ast.walk(node))


def stands_for(text: str, code: str) -> bool:
    """True if statements written anew do what a line of code does, with the same variables and nothing besides."""
    line = parsed_line(code)
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
