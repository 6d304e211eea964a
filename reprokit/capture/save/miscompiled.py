"""A step that failed in training, where it was compiled, and is finite in the replay: is it the compiler?

The recorded program is compiled again, with the compilers that the script has used, and compared with itself. Only a
value that is not finite on one side counts. The failure is blamed on the call that differs by itself, if one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from reprokit.arrivals import ignored_errors
from reprokit.capture.rewind.replayer import describe_mismatch, is_close, is_same
from reprokit.capture.save.record_program import ReplayedStep
from reprokit.locate.compiled import Compiled, run_compiled
from reprokit.locate.differences import NOT_FINITE, Difference, LoneCalls, compare, mismatch
from reprokit.locate.failure import Failure
from reprokit.program.dataflow import prepared
from reprokit.program.interpreter import run
from reprokit.program.ir import Input, Phase

_SECONDS = 20.0  # to find the call; a compiler takes up to seconds for each


def compiled_mismatch(replayed: ReplayedStep, compilers: Sequence[Compiled]) -> tuple[Failure | None, Compiled | None]:
    """The failure, and the first of the compilers that shows it, half of one before the whole.

    What differs from training in ``replayed`` becomes what differs from it compiled. Batches that the loop itself has
    prepared become inputs: training did not compile these calls, and a compiler would fuse them with those that follow.
    """
    whole = replayed.program, replayed.tensors
    with torch.enable_grad():
        if compilers:
            _without_preparation(replayed)
        for compiler in dict.fromkeys(found for one in compilers for found in (one.simpler, one)):
            with ignored_errors():  # compilers fail in as many ways as there are
                failure = _found(replayed, compiler)
                if failure is not None:
                    _compare_losses(replayed, compiler)
                    return failure, compiler
    replayed.program, replayed.tensors = whole
    return None, None


def _without_preparation(replayed: ReplayedStep) -> None:
    program = replayed.program
    dropped = prepared(program, replayed.of_loop.keys())
    made = {value for index in dropped for value in program.calls[index].output_refs()}
    calls = tuple(call for index, call in enumerate(program.calls) if index not in dropped)
    read = frozenset(value for call in calls for value in call.input_refs() if value in made)
    if not read:
        return
    outcome = run(program, replayed.tensors, keep=read, only=dropped)
    if outcome.error is None:
        inputs = (*program.inputs, *(Input(value, replayed.of_loop[value]) for value in sorted(read)))
        replayed.program = replace(program, calls=calls, inputs=inputs).pruned()
        replayed.tensors = {**replayed.tensors, **outcome.values}


def _found(replayed: ReplayedStep, compiler: Compiled) -> Failure | None:
    way = compiler.name + NOT_FINITE
    found = compare(replayed, compiler, way)
    if not isinstance(found, Difference):
        return None
    blamed = LoneCalls(compiler, replayed.program, None, way, _SECONDS).of(replayed)
    return blamed or mismatch(found, compiler, Phase.BACKWARD if found.is_gradient else Phase.FORWARD)


def _compare_losses(replayed: ReplayedStep, compiler: Compiled) -> None:
    """Note which losses of training the compiled program does not give."""
    outcome = run_compiled(replayed, frozenset(replayed.seen), compiler.compiler)
    pairs = [(old, outcome.values[value]) for value, old in replayed.seen.items() if value in outcome.values]
    replayed.mismatches = [describe_mismatch("the loss", old, new) for old, new in pairs if not is_same(old, new)]
    replayed.is_close = all(is_close(old, new) for old, new in pairs)
