"""A fix as code: the user's statement with the expressions of the changed calls replaced.

Where the statement does not show every changed call as an expression of its own, the code is these expressions alone,
and the comment above says so. Line breaks of the statement are those of `ast.unparse`.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reprokit.errors import SnapshotError
from reprokit.locate.spelling import VIEWS
from reprokit.program.functions import is_in_place
from reprokit.program.ir import Call, Program, Ref, Site, iter_refs
from reprokit.program.sites import called_name, parsed
from reprokit.render import source
from reprokit.render.names import BINARY, Match, labels, match_of, operand_nodes
from reprokit.render.printer import write_call
from reprokit.render.source import Leaf, argument, mapped, path

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")  # of a list in the path of a parameter
MAX_LINES = 6  # a fix that takes more lines is not shown as code
_NOT_TWICE = (ast.Await, ast.Call, ast.NamedExpr, ast.Yield, ast.YieldFrom)


class _NotShown(Exception):
    """The statement does not show what was changed."""


def fix_code(before: Program, after: Program) -> str:
    """The changed statements of a step, each below a comment with its place; empty when there is nothing to show.

    ``before`` and ``after`` share the `Call` objects that were not touched. The comment is ``train.py:7`` or
    ``train.py:7-9`` for a statement that can stand in the place of these lines, ``in train.py:7`` for expressions, and
    ends in ``in what it calls`` if these are in a function that the statement calls.
    """
    untouched = set(map(id, before.calls))
    names = {value: _as_path(name) for value, name in {**labels(after), **labels(before)}.items()}
    shown: dict[tuple[str, int], str] = {}  # by file and first line
    for call in after.calls:
        site = call.site
        if site is None or id(call) in untouched or call.is_optimizer_step or (site.file, site.first_line) in shown:
            continue
        change = _Change(_on_line(before, site), _on_line(after, site), names)
        with contextlib.suppress(SnapshotError):  # a name that is none in Python
            shown[site.file, site.first_line] = change.code(site)
    return "\n".join(filter(None, shown.values()))


def _as_path(name: str) -> str:
    """``layers[0].weight`` for ``layers.0.weight``, ``model[1].bias`` for ``1.bias``."""
    found = _LAYER.sub(r"[\1]", name)
    return f"model{found}" if found.startswith("[") else found


def _on_line(program: Program, site: Site) -> list[Call]:
    """All calls of a statement, those of functions that it holds (a comprehension) and of all its runs included."""
    place = (site.file, site.first_line)
    return [call for call in program.calls if call.site and (call.site.file, call.site.first_line) == place]


class _Change:
    """The calls of one statement, ``before`` and ``after``; ``names`` are those of values outside of it."""

    def __init__(self, before: Sequence[Call], after: Sequence[Call], names: Mapping[int, str]) -> None:
        kept, old = set(map(id, after)), set(map(id, before))
        self._replaced = [call for call in before if id(call) not in kept]
        self._untouched = [call for call in before if id(call) in kept]
        self._new = [call for call in after if id(call) not in old]
        self._makers = {call.outputs.value: call for call in self._new
                        if isinstance(call.outputs, Ref) and call.outputs.value not in call.input_refs()}  # fmt: skip
        self._roots: dict[tuple[int, ...], list[Call]] = {}
        for call in self._new:
            self._roots.setdefault(call.output_refs(), []).append(call)
        nodes: dict[int, ast.expr] = {}
        for call in before:
            nodes = {**operand_nodes(call), **nodes}
        named = {value: node for value, node in nodes.items() if isinstance(node, (ast.Name, ast.Attribute))}
        self._names = {**names, **{value: ast.unparse(node) for value, node in named.items()}}
        # in a statement that writes in place, a name may be another value
        self._operands = {} if any(is_in_place(call.target) for call in before) else nodes
        line = parsed(before[0].site.text) if before and before[0].site is not None else None
        self._changed = _as_written(line.tree, line.body) if line is not None else {}

    def code(self, site: Site) -> str:
        """The statement after the change, or else its new expressions, below its place."""
        heads = self._heads()
        try:
            lines, place = self._statement(site, heads), site.statement_place
        except _NotShown:
            is_known = site.span is not None and parsed(site.text) is not None
            is_inside = bool(self._replaced) and is_known and all(match_of(call) is None for call in self._replaced)
            place = f"{site.place}, in what it calls" if is_inside else f"in {site.place}"
            lines = self._expressions()
        if heads:
            lines = [f"with {', '.join(heads)}:", *(f"    {line}" for line in lines)]
        return "\n".join((f"# {place}", *lines)) if 0 < len(lines) <= MAX_LINES else ""

    def _heads(self) -> list[str]:
        """The modes that the change switches off."""
        if not self._replaced:
            return []
        mode = self._replaced[0].mode
        devices = [device for device, _ in mode.autocast if not all(call.mode.autocast for call in self._new)]
        no_grad = ["torch.no_grad()"] if mode.grad and not all(call.mode.grad for call in self._new) else []
        return [*(f'torch.autocast("{device}", enabled=False)' for device in devices), *no_grad]

    def _statement(self, site: Site, heads: Sequence[str]) -> list[str]:
        line = parsed(site.text)
        used = list[Call]()
        for call in self._replaced:  # in the order of their evaluation, so what stands inside another comes first
            node, new = self._part(call)[0], self._replacement(call, used)
            if ast.dump(self._changed.setdefault(node, new)) != ast.dump(new):
                raise _NotShown  # a loop whose turns were changed in different ways
        matches = [match_of(call) for call in self._untouched]
        is_shared = any(match is not None and match[0] in self._changed for match in matches)
        # what is elementwise gives the same without autocast; "@" does not
        is_mixed = bool(heads) and any(BINARY.get(call.name, ast.MatMult) is ast.MatMult for call in self._untouched)
        if line is None or is_shared or is_mixed or set(map(id, used)) != set(map(id, self._new)):
            raise _NotShown
        text = ast.unparse(self._rebuilt(line.tree))
        head = text.removesuffix("\n    pass") if line.after else text
        return f"{line.before}{head}".splitlines()

    def _part(self, call: Call) -> Match:
        match = match_of(call)
        if match is None:
            raise _NotShown
        return match

    def _replacement(self, call: Call, used: list[Call]) -> ast.AST:
        """The expression in the place of a call; adds the calls that it makes to ``used``."""
        made = self._roots.get(call.output_refs(), [])
        if not made or (len(made) > 1 and not call.output_refs()):
            raise _NotShown
        operands, here = {**self._operands, **operand_nodes(call)}, list[Call]()

        def written(new: Call) -> ast.expr:
            here.append(new)
            own = self._with_arguments(new, call, leaf) if new.target == call.target else None
            return own or _expression(new, leaf)

        def leaf(ref: Any) -> ast.expr:
            maker = self._makers.get(ref.value) if ref != call.outputs else None
            if maker is not None:
                return written(maker)
            if ref.value not in operands:
                raise _NotShown
            made: ast.expr = self._rebuilt(operands[ref.value])
            return made

        tree = written(made[-1])
        used += here
        reads = Counter(ref.value for new in here for ref in iter_refs((new.args, new.kwargs)))
        for value in (value for value, count in reads.items() if count > 1):
            if value in self._makers or value not in operands:
                raise _NotShown
            parts = [part for part in ast.walk(operands[value]) if isinstance(part, _NOT_TWICE)]
            if any(called_name(part) not in VIEWS for part in parts):
                raise _NotShown
        return tree

    def _with_arguments(self, new: Call, old: Call, leaf: Leaf) -> ast.expr | None:
        """The user's expression with other arguments; ``None`` where these have no place in it."""
        node, given = self._part(old)
        keywords = node.keywords if isinstance(node, ast.Call) else []
        nodes: dict[Any, ast.expr] = {**{item.arg: item.value for item in keywords}, **dict(enumerate(given))}
        had, wanted = ({**dict(enumerate(call.args)), **call.kwargs} for call in (old, new))
        other = {slot: value for slot, value in wanted.items() if slot not in had or value != had[slot]}
        added = other.keys() - had.keys()
        can_add = isinstance(node, ast.Call) and all(isinstance(slot, str) for slot in added)
        if had.keys() - wanted.keys() or not other.keys() - added <= nodes.keys() or (added and not can_add):
            return None
        trees = {slot: source.spelled(argument(value, leaf)) for slot, value in other.items()}
        places: dict[ast.AST, ast.AST] = {nodes[slot]: tree for slot, tree in trees.items() if slot not in added}
        made: ast.expr = mapped(node, {**self._changed, **places}.get)
        if isinstance(made, ast.Call):
            made.keywords += [ast.keyword(str(slot), tree) for slot, tree in trees.items() if slot in added]
        return made

    def _rebuilt(self, node: ast.AST) -> Any:
        return mapped(node, self._changed.get)

    def _expressions(self) -> list[str]:
        """The new calls of the first module by the names of their operands, each inside of the one that reads it.

        None if a statement runs other modules too that were changed, as `self.wo(relu(self.wi(x)))` does.
        """
        modules = {_LAYER.sub("[]", call.scope[-1].path) for call in self._new if call.scope}
        if len(modules) > 1:
            return []
        new = [call for call in self._new if call.scope == self._new[0].scope]
        reads = Counter(ref.value for call in new for ref in iter_refs((call.args, call.kwargs)))
        written = {ref.value for call in new if is_in_place(call.target) for ref in iter_refs(call.args[:1])}
        inside = {value for value in self._makers.keys() - written if reads[value] == 1}

        def leaf(ref: Any) -> ast.expr:
            return _expression(self._makers[ref.value], leaf) if ref.value in inside else path(self._names[ref.value])

        lines = dict[str, None]()  # once where a loop goes over the statement several times
        for call in new:
            if not inside.issuperset(call.output_refs()) or not call.output_refs():
                results = [self._names[value] for value in call.output_refs() if value not in call.input_refs()]
                text = source.text(write_call(call, leaf))
                lines[f"{', '.join(results)} = {text}" if results else text] = None
        return list(lines)


def _expression(new: Call, leaf: Leaf) -> ast.expr:
    made = write_call(new, leaf)
    if not isinstance(made, ast.expr):
        raise _NotShown
    spelled: ast.expr = source.spelled(made)
    return spelled


def _as_written(tree: ast.AST, source: str) -> dict[ast.AST, ast.AST]:
    """Names in the place of constants, so that these keep their spelling: `1e-6`, `"cpu"`."""
    in_texts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in in_texts]
    spelled = {node: ast.get_source_segment(source, node) or "" for node in constants}
    return {node: ast.Name(text) for node, text in spelled.items() if text and "\n" not in text}
