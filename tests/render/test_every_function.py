"""Every function that a program may hold, printed and run again: the same bits as from the interpreter.

Arguments are generated for most functions and written by hand for others. What is left runs on no ordinary CPU build of
torch, or is one of torch's private building blocks; the last test says which.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from reprokit.program import functions
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Input, Program, Ref, Symbol, iter_refs, map_leaves
from reprokit.render.literals import is_same
from reprokit.render.printer import write_program
from tests.render.arguments import case_for, make_float, make_index, make_positive_definite, program_of
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
# Need a tensor of one layout that only a function of another layout makes, or return no tensor.
LAYOUTS = {
    "torch.Tensor.ccol_indices", "torch.Tensor.row_indices", "torch.Tensor.sparse_mask", "torch.Tensor.sparse_resize_",
    "torch.Tensor.sparse_resize_and_clear_", "torch.Tensor.sspaddmm", "torch.ccol_indices_copy", "torch.hspmm",
    "torch.indices_copy", "torch.row_indices_copy", "torch.sspaddmm", "torch.values_copy", "torch.Tensor.resize",
    "torch.can_cast", "torch.promote_types", "torch.sparse_bsc_tensor", "torch.sparse_bsr_tensor",
}  # fmt: skip
# Differentiation: `test_code.py` has programs with it.
COVERED_ELSEWHERE = {"torch.Tensor.backward", "torch.Tensor.retain_grad", "torch.autograd.grad", *SLOW}
Layout = tuple[torch.dtype, torch.Size, torch.layout, tuple[int, ...] | None, bool]
UNINITIALISED = re.compile(r"empty|resize|_fill_mem_eff|_make_dep_token")
ROUNDED = re.compile(r"lstsq")  # the library underneath rounds by where its arguments lie in memory

make_weight, make_image = make_float(2, 2, 2, 2), make_float(1, 2, 4, 4)
make_gates = make_float(12, 3)


def make_lengths() -> torch.Tensor:
    return torch.tensor([4])


def make_log_probabilities() -> torch.Tensor:
    return torch.log_softmax(make_float(4, 1, 3)(), 2)


def make_grid() -> torch.Tensor:
    return torch.linspace(-0.9, 0.9, 18).reshape(1, 3, 3, 2)


def make_offsets() -> torch.Tensor:
    return torch.tensor([0, 2])


_RNN = (make_float(2, 1, 3), make_float(1, 1, 3))
_SQUARE, _RNN_OPTIONS = make_float(3, 3), (False, 1, 0.0, False, False, False)
BY_HAND: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("torch.Tensor.index_copy_", (_SQUARE, 0, make_index(2), make_float(2, 3)), {}),
    ("torch.native_group_norm", (make_image, None, None, 1, 2, 16, 1, 1e-5), {}),
    ("torch.Tensor.istft", (lambda: torch.stft(make_float(16)(), 4, window=torch.ones(4), return_complex=True), 4),
     {"window": lambda: torch.ones(4)}),
    ("torch.istft", (lambda: torch.stft(make_float(16)(), 4, window=torch.ones(4), return_complex=True), 4),
     {"window": lambda: torch.ones(4)}),
    ("torch.stft", (make_float(16), 4), {"window": make_float(4), "return_complex": True}),
    ("torch.Tensor.stft", (make_float(16), 4), {"window": make_float(4), "return_complex": True}),
    ("torch.nn.functional.conv3d", (make_float(1, 2, 3, 3, 3), make_float(2, 2, 2, 2, 2), None, (1, 1, 1), (0, 0, 0)),
     {}),
    ("torch.nn.functional.conv_tbc", (make_float(4, 1, 2), make_float(2, 2, 2), make_float(2)), {"pad": 1}),
    ("torch.nn.functional.conv_transpose1d", (make_float(1, 2, 4), make_float(2, 2, 2)), {"stride": 2}),
    ("torch.nn.functional.conv_transpose2d", (make_image, make_weight), {"stride": (2, 1)}),
    ("torch.convolution", (make_image, make_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}),
    ("torch.ctc_loss", (make_log_probabilities, make_index(1, 2), make_lengths, lambda: torch.tensor([1])), {}),
    ("torch.nn.functional.ctc_loss", (make_log_probabilities, make_index(1, 2), (4,), (1,)), {"zero_infinity": True}),
    ("torch.embedding_bag", (_SQUARE, make_index(4), make_offsets), {}),
    ("torch.nn.functional.embedding_bag", (make_index(4), _SQUARE, make_offsets), {"mode": "sum"}),
    ("torch.nn.functional.grid_sample", (make_image, make_grid), {"align_corners": False}),
    ("torch.grid_sampler", (make_image, make_grid, 0, 0, True), {}),
    ("torch.grid_sampler_2d", (make_image, make_grid, 0, 0, True), {}),
    ("torch.nn.functional.affine_grid", (make_float(1, 2, 3), (1, 1, 2, 2)), {"align_corners": True}),
    ("torch.affine_grid_generator", (make_float(1, 2, 3), (1, 1, 2, 2), True), {}),
    ("torch.nn.functional.batch_norm", (make_float(4, 3), make_float(3), make_float(3)), {"training": True}),
    ("torch.nn.functional.interpolate", (make_image,), {"scale_factor": 2.0, "mode": "bilinear"}),
    ("torch.nn.functional.fold", (make_float(1, 4, 4), (3, 3), (2, 2)), {}),
    ("torch.nn.functional.local_response_norm", (make_image, 2), {}),
    ("torch.nn.functional.max_unpool2d", (make_float(1, 1, 1, 1), lambda: torch.tensor([[[[3]]]]), 2), {}),
    ("torch.nn.functional.lp_pool3d", (make_float(1, 1, 2, 2, 2), 2.0, 2), {}),
    ("torch.nn.functional.fractional_max_pool2d_with_indices", (make_image, 2, (2, 2)),
     {"_random_samples": make_float(1, 2, 2)}),
    ("torch.gru", (*_RNN, [make_float(9, 3), make_float(9, 3)], *_RNN_OPTIONS), {}),
    ("torch.lstm", (make_float(2, 1, 3), [make_float(1, 1, 3)] * 2, [make_gates, make_gates], *_RNN_OPTIONS), {}),
    ("torch.rnn_relu", (*_RNN, [_SQUARE, _SQUARE], *_RNN_OPTIONS), {}),
    ("torch.rnn_tanh", (*_RNN, [_SQUARE, _SQUARE], *_RNN_OPTIONS), {}),
    ("torch.gru_cell", (_SQUARE, _SQUARE, make_float(9, 3), make_float(9, 3)), {}),
    ("torch.lstm_cell", (_SQUARE, [_SQUARE, _SQUARE], make_gates, make_gates), {}),
    ("torch.meshgrid", (make_float(3), make_float(2)), {"indexing": "ij"}),
    ("torch.broadcast_tensors", (make_float(3), _SQUARE), {}),
    ("torch.block_diag", (_SQUARE, make_float(2, 3)), {}),
    ("torch.cartesian_prod", (make_float(3), make_float(2)), {}),
    ("torch.chain_matmul", (_SQUARE, _SQUARE), {}),
    ("torch.segment_reduce", (make_float(4), "sum"), {"lengths": make_lengths}),
    ("torch.view_as_complex", (make_float(3, 2),), {}),
    ("torch.view_as_complex_copy", (make_float(3, 2),), {}),
    ("torch.ormqr", (_SQUARE, make_float(3), _SQUARE), {}),
    ("torch.sparse_csr_tensor", (lambda: torch.tensor([0, 1, 2]), make_index(2), make_float(2), (2, 2)), {}),
    ("torch.sparse_csc_tensor", (lambda: torch.tensor([0, 1, 2]), make_index(2), make_float(2), (2, 2)), {}),
    ("torch.sparse_compressed_tensor", (lambda: torch.tensor([0, 1, 2]), make_index(2), make_float(2), (2, 2)),
     {"layout": Symbol("torch.sparse_csr")}),
    ("torch.linalg.lstsq", (make_positive_definite, _SQUARE), {}),
    ("torch.tensordot", (_SQUARE, _SQUARE, 1), {}),
    ("torch.Tensor.bmm", (make_float(2, 3, 3), make_float(2, 3, 3)), {}),
    ("torch.bmm", (make_float(2, 3, 3), make_float(2, 3, 3)), {}),
    ("torch.Tensor.dot", (make_float(3), make_float(3)), {}),
    ("torch.dot", (make_float(3), make_float(3)), {}),
    ("torch.Tensor.vdot", (make_float(3), make_float(3)), {}),
    ("torch.vdot", (make_float(3), make_float(3)), {}),
    ("torch.Tensor.moveaxis", (make_image, 1, -1), {}),
    ("torch.Tensor.unflatten", (make_float(4), 0, (2, 2)), {}),
    ("torch.Tensor.lu_solve", (make_float(3, 1), _SQUARE, lambda: torch.tensor([1, 2, 3], dtype=torch.int32)), {}),
    ("torch.lu_solve", (make_float(3, 1), _SQUARE, lambda: torch.tensor([1, 2, 3], dtype=torch.int32)), {}),
    ("torch.linalg.lu_solve", (_SQUARE, lambda: torch.tensor([1, 2, 3], dtype=torch.int32), make_float(3, 1)), {}),
    ("torch.linalg.ldl_solve", (_SQUARE, lambda: torch.tensor([1, 2, 3], dtype=torch.int32), make_float(3, 1)), {}),
    ("torch.nn.functional.bilinear", (_SQUARE, _SQUARE, make_float(2, 3, 3), None), {}),
    ("torch.nn.functional.conv1d", (make_float(1, 2, 4), make_float(2, 2, 2)), {"padding": "same"}),
    ("torch.nn.functional.conv_transpose3d", (make_float(1, 2, 2, 2, 2), make_float(2, 2, 2, 2, 2)),
     {"output_padding": 0}),
    ("torch.grid_sampler_3d", (make_float(1, 1, 2, 2, 2), make_float(1, 1, 1, 1, 3), 0, 0, False), {}),
    ("torch.nn.functional.embedding", (make_index(3), _SQUARE), {"padding_idx": 0}),
    ("torch.nn.functional.max_unpool1d", (make_float(1, 1, 2), lambda: torch.tensor([[[1, 3]]]), 2), {}),
    ("torch.nn.functional.max_unpool3d", (make_float(1, 1, 1, 1, 1), lambda: torch.tensor([[[[[3]]]]]), 2), {}),
    ("torch.nn.functional.multilabel_margin_loss", (make_float(3), lambda: torch.tensor([0, -1, 1])), {}),
    ("torch.nn.functional.multi_head_attention_forward",
     (make_float(2, 1, 4), make_float(2, 1, 4), make_float(2, 1, 4), 4, 2, make_float(12, 4), make_float(12), None,
      None, False, 0.0, make_float(4, 4), make_float(4)), {"training": True, "need_weights": False}),
    ("torch.rnn_relu_cell", (_SQUARE, _SQUARE, _SQUARE, _SQUARE), {}),
    ("torch.select_scatter", (_SQUARE, make_float(3), 0, 1), {}),
    ("torch.unravel_index", (make_index(3), (3, 3)), {}),
    ("torch.linalg.tensorinv", (lambda: torch.eye(4).reshape(2, 2, 4),), {"ind": 2}),
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
    assert public_and_left(name for name, case in cases.items() if case is None) == []


@pytest.mark.parametrize(("name", "args", "kwargs"), BY_HAND, ids=[name for name, *_ in BY_HAND])
def test_functions_with_arguments_by_hand(
    tmp_path: Path, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    case = program_of(name, args, kwargs)
    assert case is not None
    assert differences(case, tmp_path) == []


def renumbering(numbers: dict[int, int]) -> Callable[[Any], Any]:
    """A change of value numbers for `map_leaves`."""
    return lambda leaf: Ref(numbers[leaf.value]) if isinstance(leaf, Ref) else leaf


def layout_of(tensor: torch.Tensor) -> Layout:
    """All that decides whether a function such as `contiguous` returns its argument or a copy."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.dtype, tensor.shape, tensor.layout, strides, tensor.is_neg()


def joined(cases: list[Case]) -> Case:
    """Programs one after the other; a later call is given an earlier result where it fits."""
    calls: list[Call] = []
    inputs: list[Input] = []
    tensors: dict[int, torch.Tensor] = {}
    made: dict[Layout, int] = {}
    for number, (program, given_tensors) in enumerate(cases):
        moved = {value: value + 1000 * number for value in range(1000)}
        used = set()
        for item in program.inputs:
            tensor = given_tensors[item.value]
            earlier = made.get(layout_of(tensor)) if tensor.is_floating_point() else None
            if earlier is not None and earlier not in used:
                moved[item.value] = earlier
                used.add(earlier)
            else:
                inputs.append(replace(item, value=moved[item.value]))
                tensors[moved[item.value]] = tensor
        call = program.calls[0]
        change = renumbering(moved)
        args, kwargs, outputs = map_leaves((call.args, dict(call.kwargs), call.outputs), change)
        mode = replace(call.mode, rng=change(call.mode.rng))
        calls.append(Call(call.target, args, kwargs, outputs, mode=mode))
        results = run(Program(tuple(calls), tuple(inputs)), tensors, keep=frozenset(calls[-1].output_refs()))
        assume(results.error is None)
        for value, tensor in results.values.items():
            if not tensor.is_quantized:
                made[layout_of(tensor)] = value
    outputs = tuple(dict.fromkeys(ref for call in calls for ref in iter_refs(call.outputs)))
    return Program(tuple(calls), tuple(inputs), outputs), tensors


@st.composite
def programs(draw: st.DrawFn) -> Case:
    """Up to five calls of functions from the whole list."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5))
    cases = [case_for(name) for name in names if not UNINITIALISED.search(name)]
    known = [case for case in cases if case is not None]
    assume(known)
    return joined(known)


@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(case=programs())
def test_programs_of_any_functions_print_and_run_again(tmp_path: Path, case: Case) -> None:
    assert differences(case, tmp_path) == []


def public_and_left(names: Iterable[str]) -> list[str]:
    """Those of the functions that should have a case by hand."""
    left = set(names) - {name for name, *_ in BY_HAND} - LAYOUTS - COVERED_ELSEWHERE
    return sorted(name for name in left if not name.rpartition(".")[2].startswith("_") and not ELSEWHERE.search(name))


def test_what_is_neither_generated_nor_by_hand() -> None:
    assert public_and_left(name for name in functions._by_function().values() if not is_generated(name)) == []
