"""The table of rules: what is known to make a training step go wrong, in files by theme.

A rule that asks for more is preferred over one that asks for less, so the general ones can stand beside the special
ones; among equals the first of the table wins.
"""

from __future__ import annotations

from reprokit.rules.division import DIVISION
from reprokit.rules.domain import DOMAIN
from reprokit.rules.gradients import GRADIENTS
from reprokit.rules.precision import PRECISION
from reprokit.rules.steps import STEPS

RULES = (*GRADIENTS, *PRECISION, *DOMAIN, *DIVISION, *STEPS)
