"""The signs an entry of the catalogue asks for: small predicates over a scene, by what they look at.

Each returns the numbers it saw, which the entry's evidence is worded with, or ``None`` when the sign is not there. The
catalogue names them, so a sign is a public word: change its meaning and the entries that name it change.
"""

from reprokit.locate.signs import edges, labels, operands, precision, training
from reprokit.locate.signs.registry import SIGNS, Numbers

__all__ = ["SIGNS", "Numbers", "edges", "labels", "operands", "precision", "training"]
