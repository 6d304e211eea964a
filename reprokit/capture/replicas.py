"""The parameters that every rank holds a copy of, compared by hashes (`--on ranks`).

Averaged gradients give every rank the same bits, so hashes of equal parameters are equal. One hash of all travels with
the answer that ranks exchange before each copy of their state. Only when these differ the ranks exchange one hash for
each parameter, and the values of the first one that differs. No collective is called.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

import torch
from torch import distributed
from torch.nn.parameter import is_lazy

from reprokit import torch_private
from reprokit.capture.tensor_names import parameter_names
from reprokit.locate.failure import RankDifference

_PIECE = 2**18  # elements that one number stands for; as text their values take up to 5.4 MiB, a store refuses 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # two for each of eight bytes
Ask = Callable[[str], Sequence[str]]  # gives the others a text, returns those of all ranks in their order


class Replicas:
    """The replicated parameters of ``modules``. ``num_compared`` counts comparisons; the parameters were equal last
    after step ``equal_after``, and are not after ``different_after``. ``is_off``: gradients are averaged over a part of
    the ranks only."""

    def __init__(self, modules: Callable[[], list[torch.nn.Module]]) -> None:
        self.num_compared = 0
        self.equal_after: int | None = None
        self.different_after = 0
        self.is_off = False
        self._modules = modules

    def parameters(self) -> list[torch.Tensor]:
        """Those of modules in `DistributedDataParallel` that it averages the gradients of, over all ranks.

        Without any, all that are trained: then the loop averages by itself. Buffers are left out: DDP writes those of
        rank 0 into the others before each forward pass, or leaves them different on purpose.
        """
        wrapper = torch.nn.parallel.DistributedDataParallel
        roots = self._modules()
        wrapped = [part for root in roots for part in root.modules() if isinstance(part, wrapper)]
        averaged = [
            part for part in wrapped if distributed.get_world_size(part.process_group) == distributed.get_world_size()
        ]
        found = [
            parameter
            for part in averaged
            for name, parameter in part.module.named_parameters()
            if name not in part.parameters_to_ignore
        ]
        if not wrapped:
            found = [
                parameter
                for root in roots
                for name, parameter in root.named_parameters()
                if parameter.requires_grad and name not in torch_private.ignored_by_ddp(root)
            ]
        return [parameter for parameter in found if _is_plain(parameter)]

    def digest(self) -> str:
        """The number of parameters and one hash of all; empty if there is nothing to compare."""
        parameters = [] if self.is_off else self.parameters()
        return f"{len(parameters)}-{digest(parameters)}" if parameters else ""

    def differ(self, digests: Sequence[str], step: int) -> bool:
        """True if the digests of the ranks after ``step`` are those of different parameters."""
        if len({text.partition("-")[0] for text in digests}) > 1 or not digests[0]:
            return False  # some rank trains something else, or compares nothing
        self.num_compared += 1
        if len(set(digests)) == 1:
            self.equal_after = step
            return False
        self.different_after = step
        return True

    def compare(self, ask: Ask, rank: int, frame: FrameType | None) -> RankDifference | None:
        """The first parameter that differs, which all ranks look for at the same place; ``None`` if all are equal.

        ``rank`` is that of this process; ``frame`` is where the loop stands, for the names of its models.
        """
        parameters = self.parameters()
        hashes = [_hash(numbers) for numbers in _numbers(parameters)]
        totals = ask(_hash(hashes))
        if len(set(totals)) == 1:
            return None
        reference, apart = _sides(totals)
        rows = [text.split() for text in ask(" ".join(hashes))]
        pairs = list(zip(rows[apart[0]], rows[reference], strict=False))
        differing = [number for number, (one, other) in enumerate(pairs) if one != other]
        first = differing[0]
        return RankDifference(
            parameter=parameter_names(self._modules(), frame)[id(parameters[first])],
            num_parameters=len(differing),
            ranks=apart,
            reference=reference,
            num_alike=totals.count(totals[reference]),
            hashes=pairs[first],
            largest=_largest(parameters[first].detach(), ask, rank, (apart[0], reference)),
        )


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """One hash of the bits of tensors, in their order."""
    return _hash(_hash(numbers) for numbers in _numbers([tensor for tensor in tensors if _is_plain(tensor)]))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor.detach()) is torch.Tensor
        and tensor.layout is torch.strided
        and not (is_lazy(tensor) or tensor.is_meta or tensor.numel() == 0)
    )


def _sides(totals: Sequence[str]) -> tuple[int, tuple[int, ...]]:
    """A rank that stands for the largest group of equal ranks, with rank 0 among groups of one size, and the rest."""
    counts = Counter(totals)
    common = max(totals, key=lambda total: (counts[total], total == totals[0]))
    return totals.index(common), tuple(rank for rank, total in enumerate(totals) if total != common)


def _largest(parameter: torch.Tensor, ask: Ask, rank: int, sides: tuple[int, int]) -> float | None:
    """The largest absolute difference of a parameter between two ranks, in its first piece that differs; only these
    two send it."""
    (numbers,) = _numbers([parameter])
    texts = ask(" ".join(map(str, numbers)))
    pairs = zip(*(texts[side].split() for side in sides), strict=False)
    start = next((place for place, (one, other) in enumerate(pairs) if one != other), 0) * _PIECE
    file = io.BytesIO()
    torch.save(parameter.reshape(-1)[start : start + _PIECE].cpu().clone(), file)
    texts = ask(base64.b64encode(file.getvalue()).decode() if rank in sides else "")
    one, other = (torch.load(io.BytesIO(base64.b64decode(texts[side])), weights_only=True) for side in sides)
    if one.shape != other.shape:
        return None
    one, other = (tensor if tensor.is_complex() else tensor.double() for tensor in (one, other))
    found = float((one - other).abs().max())
    return found if found == found and found != float("inf") else None


def _numbers(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """For each tensor one number for each of its pieces: the sum of its bits as integers, weighted by their place.

    `torch.hash_tensor` is an exclusive or, which is the same for all constants of an even number of elements. Weights
    have 31 bits and integers 32, so that no product overflows. A device is waited for once.
    """
    with torch.no_grad():
        made = [_sums(tensor.detach()) for tensor in tensors]
        found: dict[int, list[int]] = {}
        for device in {sums.device for sums in made}:
            numbers = [number for number, sums in enumerate(made) if sums.device == device]
            flat = iter(torch.cat([made[number] for number in numbers]).tolist())
            found.update((number, [next(flat) for _ in range(made[number].numel())]) for number in numbers)
    return [found[number] for number in range(len(made))]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    weights, pieces = _weights(plain.device), torch.split(plain.reshape(-1), _PIECE)
    bits = [piece.view(_BITS[plain.element_size()]) for piece in pieces]
    return torch.stack([(piece * weights[: piece.numel()]).sum() for piece in bits])


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Numbers without a pattern (multiplicative hashing, Knuth 6.4), none of them zero."""
    return torch.arange(2 * _PIECE, device=device) * 2654435761 & (2**31 - 1) | 1


def _hash(numbers: Iterable[object]) -> str:
    return hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).hexdigest()
