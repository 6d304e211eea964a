"""Which rows of a trace are wanted. Imports no torch: the command reads its options before the script runs."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Role = Literal["input", "weight", "output", "grad_input", "grad_output", "grad_weight", "variable", "grad_variable"]
ROLES: tuple[Role, ...] = ("input", "weight", "output", "grad_input", "grad_output", "grad_weight")  # of modules


@dataclass(frozen=True, slots=True)
class Choice:
    """Shell patterns for the path of the module, for its class (one of ``classes`` fits), and for the tensor: one of
    ``tensors`` fits its role, or, if it fits none of `ROLES`, the name of a variable."""

    module: str | None = None
    classes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def takes(self, module: str, cls: str) -> bool:
        """True for the rows of such a module."""
        is_named = self.module is None or fnmatchcase(module, self.module)
        return is_named and (not self.classes or any(fnmatchcase(cls, pattern) for pattern in self.classes))

    @property
    def roles(self) -> frozenset[Role]:
        """The tensors of modules that are wanted."""
        return frozenset(role for role in ROLES if not self.tensors or any(fnmatchcase(role, p) for p in self.tensors))

    @property
    def variables(self) -> tuple[str, ...]:
        """The patterns for names of variables."""
        return tuple(pattern for pattern in self.tensors if not any(fnmatchcase(role, pattern) for role in ROLES))

    @property
    def lacking(self) -> str:
        """Why there are no rows."""
        words = [f"`{word}`" for word in (self.module, *self.classes, *self.tensors) if word is not None]
        kind = "no module was called and no variable assigned" if self.variables else "no module was called"
        return kind + (f" that matches {', '.join(words)}" if words else "")
