"""The catalogue: what is known to make a training step go wrong, kept as data in the TOML files beside this module.

An entry says when it applies (kind, phase, origin call, autograd node, signs), how to word it, and which rewrites to
try. An entry that asks for more is preferred over one that asks for less, so the general ones can stand beside the
special ones.
"""

from __future__ import annotations

import functools
import keyword
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from reprokit.locate.scene import Scene
from reprokit.locate.spelling import short_name

CONFIDENCES = ("certain", "likely", "possible")
TIERS = ("origin", "context", "general")


@dataclass(frozen=True, slots=True)
class Condition:
    """A sign that has to be there, with its parameters."""

    sign: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A rewrite to try, its parameters, and a sentence about it.

    ``code`` says it in Python where no line of the user's does, as with the options of an optimizer. ``{call}`` is the
    origin, ``{optimizer}`` its class where it is an optimizer's step, ``{input}`` the variable of an input that was bad
    already, ``x`` if its name is no identifier.
    """

    rewrite: str
    parameters: Mapping[str, Any]
    text: str
    code: str = ""

    def words_for(self, scene: Scene) -> tuple[str, str]:
        """The sentence and the code, with the origin's name in them."""
        name = short_name(scene.call) if scene.call is not None else "the input"
        optimizer = scene.call.target.split(".")[-2] if scene.call is not None else ""
        given = scene.failure.input_name or ""
        variable = given if given.isidentifier() and not keyword.iskeyword(given) else "x"
        return self.text.format(call=name), self.code.format(call=name, optimizer=optimizer, input=variable)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One mechanism. Empty ``phases``, ``calls`` and ``nodes`` mean any; an exception has to be among the ``kinds``.

    ``tier``: ``origin`` explains what the origin did, ``context`` the story before it (growth over many steps), and
    ``general`` fits so much that it is the last resort. ``mechanism`` and ``evidence`` are templates over the numbers
    that the signs saw. ``needs``: what the function takes for a finite result, where it is defined to return the nan or
    inf. ``is_of_torch``: an issue for PyTorch.
    """

    id: str
    title: str
    mechanism: str
    confidence: str
    advice: str
    kinds: tuple[str, ...] = ("nan", "inf")
    phases: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    when: tuple[Condition, ...] = ()
    evidence: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    tier: str = "origin"
    needs: str = ""
    is_of_torch: bool = False


FILES = (
    "gradients", "half", "domain", "softmax", "optimizers", "division", "reductions", "labels", "linalg", "inputs",
    "growth", "infinities", "graphs", "events",
)  # fmt: skip


@functools.cache
def entries() -> tuple[CatalogueEntry, ...]:
    """All entries, in the order of the files and in them."""
    return tuple(entry for name in FILES for entry in _read(name))


def _read(name: str) -> Iterator[CatalogueEntry]:
    text = resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    for plain in tomllib.loads(text)["entry"]:
        yield _entry(plain)


def _entry(plain: Mapping[str, Any]) -> CatalogueEntry:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    fields["when"] = tuple(_condition(item) for item in plain.get("when", ()))
    fields["remedies"] = tuple(_remedy(item) for item in plain.get("remedies", ()))
    for name in ("mechanism", "advice"):
        fields[name] = " ".join(plain[name].split())
    return CatalogueEntry(**fields)


def _condition(plain: str | Mapping[str, Any]) -> Condition:
    if isinstance(plain, str):
        return Condition(plain, {})
    return Condition(plain["sign"], {name: value for name, value in plain.items() if name != "sign"})


def _remedy(plain: Mapping[str, Any]) -> Remedy:
    own = ("rewrite", "text", "code")
    parameters = {name: value for name, value in plain.items() if name not in own}
    return Remedy(plain["rewrite"], parameters, plain["text"], plain.get("code", ""))
