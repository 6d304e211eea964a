"""How plain the contents of a tensor are: what a person would rather read, as a number; and plain contents to try.

Zeros come first, then ones, then one constant, then a few short numbers, then anything else. Among constants fewer
digits win, then the magnitude closer to one. Infinities that are wanted (a mask) stay where they are; only finite
elements are replaced.
"""

from __future__ import annotations

import math

import torch

from reprokit.program.dataflow import contents

ZEROS, ONES, CONSTANT, SHORT, ANY = 0.0, 1.0, 2.0, 4.0, 5.0
MAX_LITERALS = 64  # a script lists at most so many numbers
NUM_SEEDS = 8  # each seed costs a check
_MAX_DIGITS = 17  # of a float64
_FIRST = 64  # elements that tell most tensors from constants
_CUDA_STATE = 16  # bytes: seed and offset
_EXPONENTIAL = 100.0  # most functions with an exponential overflow in half precision
_PRODUCT = {torch.float16: 300.0, torch.float64: 1e160}  # the square overflows
_LARGEST = {torch.float16: 6e4, torch.float64: 1e308}


def plainness(tensor: torch.Tensor) -> float:
    """0 for zeros, 1 for ones, 2 and more for a constant, 4 and more for short numbers, 5 and more for anything."""
    values = contents(tensor)
    if values.numel() == 0:
        return ZEROS
    constant = constant_of(tensor)
    if constant is not None:
        return _plainness_of_constant(constant, values.dtype)
    if values.numel() > MAX_LITERALS:
        return ANY
    digits = _most_digits(values)
    return SHORT + digits / 100 if digits <= 3 else ANY + digits / 100


def constant_of(tensor: torch.Tensor) -> float | complex | int | bool | None:
    """The number that every element is, or ``None``."""
    values = contents(tensor)
    if values.numel() == 0:
        return None
    first = values[0]
    is_nan = values.is_floating_point() and bool(first.isnan())
    for part in (values[:_FIRST], values):  # the beginning tells of most tensors that they are not constant
        if not bool((part.isnan() if is_nan else part == first).all()):
            return None
    number: float | complex | int | bool = first.item()
    return number


def state_of_seed(seed: int, num_bytes: int) -> torch.Tensor:
    """The state of a generator right after it was given a seed: of the CPU, or of CUDA, which is seed and offset."""
    if num_bytes == _CUDA_STATE:
        return torch.tensor(list(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8)
    return torch.Generator().manual_seed(seed).get_state()


def seed_of(state: torch.Tensor) -> int | None:
    """The small seed that leads to this state, or ``None``."""
    seeds = range(NUM_SEEDS)
    return next((seed for seed in seeds if torch.equal(state.cpu(), state_of_seed(seed, state.numel()))), None)


def num_digits(number: float | complex | int | bool, dtype: torch.dtype) -> int:
    """The fewest significant digits that name this number in its dtype."""
    return _most_digits(torch.tensor([number], dtype=dtype))


def _most_digits(values: torch.Tensor) -> int:
    """The fewest significant digits that name every one of the numbers in their dtype; 0 if all are 0 or not finite."""
    if values.is_complex():
        return _most_digits(torch.view_as_real(values).flatten())
    numbers = [number for number in dict.fromkeys(values.tolist()) if math.isfinite(number) and number]
    for digits in range(_MAX_DIGITS):
        if not numbers:
            return digits
        rounded = [float(f"{number:.{digits + 1}g}") for number in numbers]
        if values.is_floating_point():
            rounded = torch.tensor(rounded, dtype=torch.float64).to(values.dtype).tolist()
        numbers = [number for number, found in zip(numbers, rounded, strict=True) if number != found]
    return _MAX_DIGITS


def shortened(number: float | int | bool, digits: int, dtype: torch.dtype) -> float:
    """The number rounded to so many significant digits, as its dtype holds it."""
    rounded = float(f"{float(number):.{digits}g}")
    if not dtype.is_floating_point:
        return rounded
    return float(torch.tensor(rounded, dtype=torch.float64).to(dtype))


def _plainness_of_constant(number: float | complex | int | bool, dtype: torch.dtype) -> float:
    if number == 0:
        is_negative = not isinstance(number, complex) and math.copysign(1.0, number) < 0
        return ZEROS + 0.001 * is_negative
    if number == 1:
        return ONES
    size = abs(number)
    exponent = min(abs(math.log10(size)), 400.0) if math.isfinite(size) else 0.0
    sign = 0.0001 if not isinstance(number, complex) and number < 0 else 0.0
    return CONSTANT + num_digits(number, dtype) / 20 + exponent / 10_000 + sign


def ladder(dtype: torch.dtype) -> tuple[float, ...]:
    """Large constants in ascending order."""
    return _EXPONENTIAL, _PRODUCT.get(dtype, 1e20), _LARGEST.get(dtype, 3e38)


def filled(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """The tensor with every finite element replaced, in the same memory layout."""
    plain = torch.full_like(tensor, number, requires_grad=False)
    infinite = contents(tensor).isinf().reshape(tensor.shape)
    return torch.where(infinite, tensor, plain) if bool(infinite.any()) else plain


def sign_of(tensor: torch.Tensor) -> float:
    """-1 when the element largest in size is negative, else 1."""
    values = contents(tensor)
    if values.is_complex():
        return 1.0
    finite = values[values.isfinite()]
    return -1.0 if finite.numel() and float(finite[finite.abs().argmax()]) < 0 else 1.0


def largest_of(tensor: torch.Tensor) -> float:
    """The largest size of a finite element."""
    return float(contents(tensor).abs().nan_to_num(posinf=0.0).max())


def rounded(tensor: torch.Tensor, digits: int) -> torch.Tensor:
    """Every element with so many significant digits."""
    values = [shortened(number, digits, tensor.dtype) for number in contents(tensor).tolist()]
    found = torch.tensor(values, dtype=tensor.dtype).reshape(tensor.shape)
    return torch.empty_like(tensor).copy_(found)
