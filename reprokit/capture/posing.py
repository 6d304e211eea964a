"""Code that runs in the place of torch's own `nn.Module.__call__`, with its file, name, line and globals.

Code of the user's inside of a module looks at the frames around it: warnings with a ``stacklevel``, logs, tracebacks.
So a watched call adds no frame: what is done before and after it returns before the user's code goes on.
"""

from __future__ import annotations

import ast
import dis
from types import CodeType
from typing import Any

from reprokit import torch_private

MARK = "reprokit_roots"  # a variable of the code that runs in the place of torch's
_TEMPLATE = f"""
def make(cls, original, torchs, {MARK}, recorder, is_compiling):
    def {torch_private.wrapped_call_code.co_name}(self, *args, **kwargs):
        opened = None
        if {MARK} is not None and (not recorder.depth or recorder.is_stepping) and not is_compiling():
            opened = {MARK}.open(cls, self, args, kwargs)
        try:
            inner = super(cls, self).__call__ if original is None else original.__get__(self)
            if getattr(getattr(inner, "__func__", None), "__code__", None) is not torchs and {MARK} is not None:
                inner = {MARK}.behind(inner, self)
            if getattr(getattr(inner, "__func__", None), "__code__", None) is torchs:
                output = ({torch_private.CALL})(*args, **kwargs)
            else:
                output = inner(*args, **kwargs)
        except BaseException as error:
            if opened is not None:
                {MARK}.fail(opened, error)
            raise
        if opened is not None:
            {MARK}.close(opened, output)
        return output
    return {torch_private.wrapped_call_code.co_name}
"""


def _made_in_the_place_of(code: CodeType, template: str) -> CodeType:
    """The code of a function that makes another one, all of which stands at the line of ``code`` that calls on."""
    calls = [one.positions for one in dis.get_instructions(code) if one.opname.startswith("CALL") and one.positions]
    place: Any = calls[-1]
    tree = ast.parse(template)
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt, ast.excepthandler, ast.arg, ast.keyword)):
            node.lineno, node.end_lineno = place.lineno, place.end_lineno
            node.col_offset, node.end_col_offset = place.col_offset, place.end_col_offset
    made: Any = tree.body[0]
    made.lineno = made.body[0].lineno = code.co_firstlineno
    module = compile(tree, code.co_filename, "exec")
    return next(part for part in module.co_consts if isinstance(part, CodeType))


MAKE = _made_in_the_place_of(torch_private.wrapped_call_code, _TEMPLATE)
POSING = next(part for part in MAKE.co_consts if isinstance(part, CodeType))
