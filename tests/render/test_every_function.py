"""Functions that a program may hold, printed and run again: the same bits as from the interpreter.

Arguments are generated for most functions and written by hand for some others.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit.program import functions
from reprokit.program.interpreter import run
from reprokit.render.literals import is_same
from reprokit.render.printer import write_program
from tests.render.arguments import case_for, make_float, make_index, program_of
from tests.render.programs import Case, execute

# These read beyond their arguments, take the process down or promise nothing when those do not fit together.
DANGEROUS = re.compile(
    r"torch\.(Tensor\.index_copy_|native_group_norm|_convert_indices_from_csr_to_coo|_cummin_helper|_cummax_helper"
    r"|_compute_linear_combination|_dyn_quant_matmul_4bit|_neg_view_copy|_nnpack_spatial_convolution|_pad_packed_sequence"
    r"|_transform_bias_rescale_qkv|_add_batch_dim|_reshape_alias_copy|_weight_norm_interface"
    r"|sparse_(csr|csc|bsr|bsc)_tensor|linalg\.lstsq)"
)
# Other devices, libraries that a build may lack, and layouts whose arguments are results of private functions.
ELSEWHERE = re.compile(
    r"cuda|cudnn|cufft|cslt|miopen|mkldnn|mps|xpu|ipu|mtia|fbgemm|quantize|fake_quant|q_per_channel|_scaled_|grouped_mm"
    r"|pin_memory|record_stream|batch_norm_(backward|elemt|gather|stats)|nested|_amp_|philox|triton|int4pack|int8pack"
)
SLOW = {"torch.lobpcg", "torch.pca_lowrank", "torch.svd_lowrank"}
UNINITIALISED = re.compile(r"empty|resize|_fill_mem_eff|_make_dep_token")
ROUNDED = re.compile(r"lstsq")  # the library underneath rounds by where its arguments lie in memory

make_weight, make_image = make_float(2, 2, 2, 2), make_float(1, 2, 4, 4)
make_gates = make_float(12, 3)


def make_log_probabilities() -> torch.Tensor:
    return torch.log_softmax(make_float(4, 1, 3)(), 2)


def make_offsets() -> torch.Tensor:
    return torch.tensor([0, 2])


_RNN = (make_float(2, 1, 3), make_float(1, 1, 3))
_SQUARE, _RNN_OPTIONS = make_float(3, 3), (False, 1, 0.0, False, False, False)
BY_HAND: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("torch.stft", (make_float(16), 4), {"window": make_float(4), "return_complex": True}),
    ("torch.nn.functional.conv3d", (make_float(1, 2, 3, 3, 3), make_float(2, 2, 2, 2, 2), None, (1, 1, 1), (0, 0, 0)),
     {}),
    ("torch.convolution", (make_image, make_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}),
    ("torch.nn.functional.ctc_loss", (make_log_probabilities, make_index(1, 2), (4,), (1,)), {"zero_infinity": True}),
    ("torch.embedding_bag", (_SQUARE, make_index(4), make_offsets), {}),
    ("torch.nn.functional.embedding_bag", (make_index(4), _SQUARE, make_offsets), {"mode": "sum"}),
    ("torch.nn.functional.batch_norm", (make_float(4, 3), make_float(3), make_float(3)), {"training": True}),
    ("torch.nn.functional.interpolate", (make_image,), {"scale_factor": 2.0, "mode": "bilinear"}),
    ("torch.gru", (*_RNN, [make_float(9, 3), make_float(9, 3)], *_RNN_OPTIONS), {}),
    ("torch.lstm", (make_float(2, 1, 3), [make_float(1, 1, 3)] * 2, [make_gates, make_gates], *_RNN_OPTIONS), {}),
    ("torch.rnn_relu", (*_RNN, [_SQUARE, _SQUARE], *_RNN_OPTIONS), {}),
    ("torch.gru_cell", (_SQUARE, _SQUARE, make_float(9, 3), make_float(9, 3)), {}),
    ("torch.lstm_cell", (_SQUARE, [_SQUARE, _SQUARE], make_gates, make_gates), {}),
    ("torch.meshgrid", (make_float(3), make_float(2)), {"indexing": "ij"}),
    ("torch.broadcast_tensors", (make_float(3), _SQUARE), {}),
    ("torch.tensordot", (_SQUARE, _SQUARE, 1), {}),
    ("torch.Tensor.unflatten", (make_float(4), 0, (2, 2)), {}),
    ("torch.nn.functional.embedding", (make_index(3), _SQUARE), {"padding_idx": 0}),
    ("torch.nn.functional.multi_head_attention_forward",
     (make_float(2, 1, 4), make_float(2, 1, 4), make_float(2, 1, 4), 4, 2, make_float(12, 4), make_float(12), None,
      None, False, 0.0, make_float(4, 4), make_float(4)), {"training": True, "need_weights": False}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Torch warns about many of its functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_generated(name: str) -> bool:
    return not (DANGEROUS.fullmatch(name) or ELSEWHERE.search(name) or name in SLOW)


NAMES = sorted(name for name in functions._by_function().values() if is_generated(name))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor with the same numbers."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.resolve_conj().resolve_neg()


def differences(case: Case, folder: Path) -> list[str]:
    """Where the printed program gives other bits than the interpreter; the calls themselves are known to work."""
    program, tensors = case
    everything = [item.value for item in program.inputs if item.role != "rng"]
    everything += [value for call in program.calls for value in call.output_refs()]
    expected = run(program, tensors, keep=frozenset(everything))
    assert expected.error is None
    code = write_program(program, tensors, keep=everything)
    generator = torch.get_rng_state()
    try:
        variables = execute(code, folder)
    except Exception as error:
        return [f"{error!r} in {[*code.inputs, *code.body]}"]
    finally:
        torch.set_rng_state(generator)
    if any(UNINITIALISED.search(call.target) for call in program.calls):
        return []
    agree = torch.allclose if any(ROUNDED.search(call.target) for call in program.calls) else is_same
    pairs = ((name, eval(name, dict(variables)), expected.values[value]) for value, name in code.names.items()
             if value in expected.values)  # fmt: skip
    return [f"{name} in {code.body}" for name, made, wanted in pairs if not agree(plain(made), plain(wanted))]


@pytest.mark.parametrize("part", range(0, 8, 2))
def test_every_second_function_prints_and_runs_again(tmp_path: Path, part: int) -> None:
    cases = {name: case_for(name) for name in NAMES[part::8]}
    wrong = {name: found for name, case in cases.items() if case is not None and (found := differences(case, tmp_path))}
    assert not wrong


@pytest.mark.parametrize(("name", "args", "kwargs"), BY_HAND, ids=[name for name, *_ in BY_HAND])
def test_functions_with_arguments_by_hand(
    tmp_path: Path, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    case = program_of(name, args, kwargs)
    assert case is not None
    assert differences(case, tmp_path) == []
