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

    def has_role(self, role: str) -> bool:
        """True for a tensor of a module that is wanted."""
        return not self.tensors or any(fnmatchcase(role, pattern) for pattern in self.tensors)

    def has_variable(self, name: str) -> bool:
        """True for a variable that is wanted."""
        patterns = (pattern for pattern in self.tensors if fnmatchcase(name, pattern))
        return any(not any(fnmatchcase(role, pattern) for role in ROLES) for pattern in patterns)

    def __str__(self) -> str:
        words = [f"`{word}`" for word in (self.module, *self.classes, *self.tensors) if word is not None]
        return f"nothing matches {', '.join(words)}" if words else "no module was called"
