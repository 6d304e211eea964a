"""The rewrites that the catalogue's fixes are made of: each turns a captured step into one that may not fail.

A rewrite says nothing about whether it helps; the edited step is run for that. It returns ``None`` where it does not
apply, for instance when the argument is a number and not a tensor.
"""

from reprokit.locate.edits import REWRITES
from reprokit.locate.rewrites import functions, guards

__all__ = ["REWRITES", "functions", "guards"]
