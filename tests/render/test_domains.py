"""What is said of a function at the edge of its domain is true of what it was given, and of nothing else."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

from reprokit.locate.domains import DOMAINS, number_named
from reprokit.locate.failure import Failure
from reprokit.locate.ways import ways_of
from reprokit.program.functions import allowed_names, function_named
from reprokit.program.ir import Call, Ref
from reprokit.render.definitions import Edge, defined_edge, scene_of
from reprokit.render.expectation import expect
from reprokit.shrink.exact import OriginCall
from tests.locate.mechanisms import CASES

INF = float("inf")
MASKED = torch.tensor([[0.0, 1.0], [-INF, -INF]])
LOGITS = torch.tensor([[-INF, 1.0]])


def edge_of(name: str, *args: Any, way: str = "nan", phase: str = "forward", **kwargs: Any) -> Edge | None:
    """What the rules answer for a call; its tensors are numbered by their positions."""
    refs = tuple(Ref(place) if isinstance(item, torch.Tensor) else item for place, item in enumerate(args))
    targets = (f"torch.{name}", f"torch.nn.functional.{name}", f"torch.linalg.{name}", f"torch._{name}")
    target = next(target for target in targets if target in allowed_names())
    node = "Backward0" if phase == "backward" else None
    failure = Failure(phase=phase, kind=way.strip("+-"), call=target, way=way, backward_node=node)
    result = torch.tensor(float(way))
    with contextlib.suppress(TypeError), warnings.catch_warnings(action="ignore"):  # not all are whole calls
        made = function_named(target)(*args, **kwargs)
        result = made if isinstance(made, torch.Tensor) else made[0]
    given = {place: item for place, item in enumerate(args) if isinstance(item, torch.Tensor)}
    origin = OriginCall(Call(target, refs, kwargs, Ref(99)), given, {99: result}, None)
    return defined_edge(scene_of(origin, failure))


@pytest.mark.parametrize(
    ("edge", "words", "fact"),
    [
        (lambda: edge_of("softmax", MASKED, dim=1), "for a fully masked row", "exp(-inf) / sum is 0 / 0"),
        (lambda: edge_of("softmax", MASKED.T, 0), "for a fully masked row", "exp(-inf) / sum is 0 / 0"),
        (lambda: edge_of("logsumexp", MASKED, dim=1, way="-inf"), "for a fully masked row", "whose logarithm is -inf"),
        (lambda: edge_of("logsumexp", MASKED[:, None], (1, 2), way="-inf"), "for a fully masked row", "is -inf"),
        (lambda: edge_of("softmin", MASKED, dim=1), "with an infinite operand", "inf - inf"),
        (lambda: edge_of("logsumexp", torch.zeros(0), way="-inf"), "for an empty tensor", "whose logarithm is -inf"),
        (lambda: edge_of("std", torch.ones(1)), "for a single element", "n - 1, which is zero"),
        (lambda: edge_of("std", torch.tensor(1.0), 0), "for a single element", "n - 1, which is zero"),
        (lambda: edge_of("std", torch.ones(2, 1), 1, True), "for a single element", "n - 1, which is zero"),
        (lambda: edge_of("std", torch.tensor([INF]), False), "with an infinite operand", "inf - inf"),
        (lambda: edge_of("var", torch.tensor([INF]), correction=0), "with an infinite operand", "inf - inf"),
        (lambda: edge_of("cross_entropy", LOGITS, way="+inf"), "with a logit of -inf", "makes the loss infinite"),
        (lambda: edge_of("kl_div", LOGITS, torch.zeros(1, 2)), "with a logit of -inf", "0 * inf"),
        (lambda: edge_of("cross_entropy", -LOGITS), "with an infinite operand", "inf - inf"),
        (lambda: edge_of("nll_loss", torch.zeros(1, 2), torch.tensor([0]), None, None, 0),
         "when every target is ignored", "0 / 0"),
        (lambda: edge_of("weight_norm", torch.eye(2)[:1], torch.ones(2), 1), "for a row of zeros", "0 / 0"),
        (lambda: edge_of("eigh", torch.eye(2), phase="backward"), "for repeated eigenvalues", "two agree"),
        (lambda: edge_of("svd", torch.eye(2, 3), phase="backward"), "for repeated singular values", "two agree"),
        (lambda: edge_of("svd", torch.zeros(2, 1), phase="backward"), "for a singular value of zero", "not square"),
    ],
)  # fmt: skip
def test_what_is_said(edge: Any, words: str, fact: str) -> None:
    found = edge()
    assert found is not None and found.words == words and fact in found.fact


@pytest.mark.parametrize(
    "edge",
    [
        lambda: edge_of("eigh", torch.diag(torch.tensor([1.0, -1.0])), phase="backward"),
        lambda: edge_of("eig", torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), phase="backward"),
        lambda: edge_of("svd", torch.zeros(1, 1), phase="backward"),
        lambda: edge_of("weight_norm", torch.eye(2)[:1], torch.ones(1)),
        lambda: edge_of("std", torch.ones(3)),
        lambda: edge_of("softmax", torch.zeros(2, 2), dim=1),
    ],
)
def test_where_nothing_is_said(edge: Any) -> None:
    assert edge() is None


@pytest.mark.parametrize(
    ("name", "words"), [("in-place-on-leaf", "it refuses"), ("weight-norm-of-zero", "g * v / ||v|| is 0 / 0")]
)
def test_a_function_does_what_it_is_defined_to_do(name: str, words: str) -> None:
    assert words in expect(CASES[name]()).expected


@pytest.mark.parametrize("name", [name for name, domain in DOMAINS.items() if domain.operand == "x"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_table_of_domains_says_what_torch_does(name: str, dtype: torch.dtype) -> None:
    def ways(x: torch.Tensor) -> tuple[frozenset[str], frozenset[str]]:
        result = getattr(torch, name)(x.requires_grad_())
        result.sum().backward()
        assert x.grad is not None
        return ways_of(result.detach()), ways_of(x.grad)

    domain = DOMAINS[name]
    assert not bool(domain.places(torch.tensor([domain.harmless], dtype=dtype)).any())
    assert ways(torch.tensor([domain.harmless], dtype=dtype)) == (frozenset(), frozenset())
    for place, points in enumerate((domain.forward, domain.backward)):
        for point in points:
            bound = number_named(point.bound, dtype)
            x = torch.tensor([{"below": bound - 0.5, "equal": bound, "above": bound + 0.5}[point.test]], dtype=dtype)
            assert bool(point.places(x).all()) and bool(domain.places(x).all())
            assert domain.edge is None or bool(domain.edge.places(x).all())
            assert ways(x)[place] and ways(x)[place] <= set(point.ways)


def test_the_operand_in_question_is_the_infinite_one() -> None:
    found = edge_of("mul", torch.zeros(1), torch.tensor([INF]))
    assert found is not None and found.values == (1,)
    found = edge_of("div", torch.tensor([INF]), torch.tensor([INF]))
    assert found is not None and found.values == (0, 1)
