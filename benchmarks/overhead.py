"""What watching costs a training that is healthy: reprokit, and what people use today, against the bare loop.

    python benchmarks/overhead.py [--shapes NAME ...] [--variants NAME ...] [--seconds S] [--json FILE]

One process. Every variant trains a model of its own; single steps go plain, variant, variant, plain, so that a drift of
the machine hits both sides alike, and the ratio is taken inside each such quadruple. Variants take turns in rounds.
The table goes to stderr, JSON to stdout. README.md in this folder says how to read them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import math
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from command import JSON, new_parser, print_json
from shapes import Training, make
from torch import nn

from reprokit.capture.budget import WINDOW
from reprokit.capture.session import Session
from reprokit.capture.world import World

SHARES = {  # of the time, by how long a step takes
    "mlp": 0.1,
    "gpt": 0.3,
    "cnn": 0.13,
    "narrow": 0.13,
    "loop-calls": 0.08,
    "data-first": 0.03,
    "rl": 0.08,
    "many-parameters": 0.15,
}
TRIM = 0.01  # of the quadruples, at either end, left out of the mean
COLLECT_EVERY = 0.5  # seconds between garbage collections, outside of what is timed
SETTLE_BELOW = 0.2  # seconds: after every switch, a step shorter than this is first run once without being timed
WARM_COPIES = 3
LONGEST_STRETCH = 3000  # steps one after another, for the work of the garbage collector


class Noticed(Exception):
    """A detector saw something that is not finite."""


# -- variants ---------------------------------------------------------------------------------------------------------


class Variant:
    """A way to watch a training, which can be switched on and off exactly. This one does nothing: the control."""

    is_in_every_round: ClassVar[bool] = False

    def __init__(self, training: Training) -> None:
        self.training = training
        self._removable: list[Any] = []

    def on(self) -> None:
        """Start watching."""

    def off(self) -> None:
        """Stop watching: from here on the loop is bare."""
        for handle in self._removable:
            handle.remove()
        self._removable = []

    def step(self) -> None:
        """One step of the loop while watching."""
        self.training.step()

    def warm_up(self, seconds: float) -> None:
        """Reach the steady state; takes ``seconds`` at most, and a few steps at least."""
        self.on()
        for _ in range(3):
            self.step()
        self.off()

    def describe(self) -> JSON:
        """What is worth telling beside the times."""
        return {}


class Control(Variant):
    """Nothing against nothing: what the method says where there is no difference."""

    is_in_every_round = True


class Reprokit(Variant):
    """A session with the default settings in the middle of a long run, its copies of the state included."""

    is_in_every_round = True
    settings: ClassVar[JSON] = {"budget": None}

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.session = Session(quiet=True, directory=Path(tempfile.gettempdir()), **self.settings)
        self._steps = 0
        self._copies_before = 0

    @property
    def _world(self) -> World:
        return self.session._loop.world

    def on(self) -> None:
        self.session.resume()

    def off(self) -> None:
        if not self.session._recorder.enabled:
            raise RuntimeError(f"the session stopped watching a healthy training: {self.session.results}")
        self.session.pause()

    def step(self) -> None:
        self.training.step()
        self._steps += 1

    def warm_up(self, seconds: float) -> None:
        super().warm_up(seconds)
        self.on()
        end = time.perf_counter() + seconds
        while self._world.num_copies < WARM_COPIES and time.perf_counter() < end:
            self.step()
        self.off()
        self._steps, self._copies_before = 0, self._world.num_copies

    def describe(self) -> JSON:
        world = self._world
        return {
            "watched_steps": self._steps,
            "copies": world.num_copies - self._copies_before,
            "copy_bytes": sum(copy.num_bytes for copy in world.copies),
        }


class ReprokitEveryStep(Reprokit):
    """A session that judges everything in every step."""

    is_in_every_round = False
    settings: ClassVar[JSON] = {"watch": "every-step", "budget": None}


class ReprokitRecord(Reprokit):
    """A session that measures gradient and weight norms of every parameter at its own pace.

    ``record_share`` is the CPU time in the measuring over that of the steps: steadier than a ratio of steps, of which
    one in many has it all.
    """

    is_in_every_round = False
    settings: ClassVar[JSON] = {"record": "auto", "budget": None}

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._all = self._recording = 0.0
        norms = self.session._loop.norms
        assert norms is not None
        for name in ("before_clip", "measure", "keep"):
            setattr(norms, name, self._timed(getattr(norms, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            found = function(*args)
            self._recording += time.thread_time() - started
            return found

        return timed

    def step(self) -> None:
        started = time.thread_time()
        super().step()
        self._all += time.thread_time() - started

    def describe(self) -> JSON:
        return {**super().describe(), "record_share": self._recording / self._all if self._all else 0.0}


class ReprokitEarly(Reprokit):
    """A session with all detectors of early warning; ``detector_us`` is their CPU time a step, in microseconds."""

    is_in_every_round = False
    settings: ClassVar[JSON] = {"on": ("nonfinite", "exception", "early"), "budget": None}

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._num_seen, self._seeing = 0, 0.0
        loop, early = self.session._loop, self.session._early
        assert early is not None
        early.act = self._timed(early.act)  # type: ignore[method-assign]
        loop.has_alarm = self._timed(loop.has_alarm)

    def _timed(self, look: Callable[[], Any]) -> Callable[[], Any]:
        """A function with its CPU time measured, less that of reading the clock."""

        def timed() -> Any:
            before, started = time.thread_time(), time.thread_time()
            found = look()
            self._seeing += time.thread_time() - started - (started - before)
            return found

        return timed

    def step(self) -> None:
        super().step()
        self._num_seen += 1

    def describe(self) -> JSON:
        return {**super().describe(), "detector_us": 1e6 * self._seeing / self._num_seen if self._num_seen else 0.0}


class ReprokitWithin10(Reprokit):
    """A session that has stepped down to its budget, as far as that was necessary, before it is timed."""

    is_in_every_round = False
    settings: ClassVar[JSON] = {"budget": 10}

    def warm_up(self, seconds: float) -> None:
        super().warm_up(seconds)
        budget = self.session._loop.budget
        self.on()
        for _ in range(4):
            budget._next = 0.0
            for _ in range(WINDOW + 1):
                self.step()
        self.off()
        budget.limit = None

    def describe(self) -> JSON:
        return {**super().describe(), "noted_every": self.session._loop.budget.every}


class ReprokitWithin3(ReprokitWithin10):
    """The same with a budget of 3%."""

    settings: ClassVar[JSON] = {"budget": 3}


class ReprokitWithin1(ReprokitWithin10):
    """The same with a budget of 1%."""

    settings: ClassVar[JSON] = {"budget": 1}


class Anomaly(Variant):
    """``torch.autograd.set_detect_anomaly(True)``."""

    def on(self) -> None:
        torch.autograd.set_detect_anomaly(True)

    def off(self) -> None:
        torch.autograd.set_detect_anomaly(False)


class UnderflowOverflow(Variant):
    """``transformers.debug_utils.DebugUnderflowOverflow``, whose hooks are kept so that they can be taken away."""

    def on(self) -> None:
        from transformers.debug_utils import DebugUnderflowOverflow

        removable = self._removable

        class Removable(DebugUnderflowOverflow):  # type: ignore[misc]
            def _register_forward_hook(self, module: nn.Module) -> None:
                removable.append(module.register_forward_hook(self.forward_hook))

        Removable(self.training.model)


class LeafHooks(Variant):
    """A forward hook on every leaf module that looks for NaN and infinities in its output."""

    def on(self) -> None:
        def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if torch.isnan(output).any() or torch.isinf(output).any():
                raise Noticed(type(module).__name__)

        leaves = (module for module in self.training.model.modules() if not list(module.children()))
        self._removable = [module.register_forward_hook(look) for module in leaves]


class NormHooks(Variant):
    """Forward and full backward hooks on every module that read the norms of outputs and of their gradients."""

    def on(self) -> None:
        self.norms: dict[str, float] = {}

        def note(name: str, tensor: torch.Tensor) -> None:
            self.norms[name] = tensor.detach().norm().item()
            if not math.isfinite(self.norms[name]):
                raise Noticed(name)

        def after_forward(name: str) -> Callable[..., None]:
            return lambda module, args, output: note(f"{name} output", output)

        def after_backward(name: str) -> Callable[..., None]:
            return lambda module, grad_in, grad_out: note(f"{name} gradient", grad_out[0])

        for name, module in self.training.model.named_modules():
            self._removable.append(module.register_forward_hook(after_forward(name)))
            self._removable.append(module.register_full_backward_hook(after_backward(name)))


class ThreeMsHook(Variant):
    """A hook on every module that looks for NaN and infinities in its inputs and outputs."""

    def on(self) -> None:
        def look(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            for tensor in (*args, output):
                if tensor.is_floating_point() and (torch.isnan(tensor).any() or torch.isinf(tensor).any()):
                    raise Noticed(type(module).__name__)

        self._removable = [module.register_forward_hook(look) for module in self.training.model.modules()]


class CloneAndCheck(Variant):
    """A capture that clones every batch and looks at every gradient before the update."""

    def on(self) -> None:
        self.batch: tuple[torch.Tensor, ...] = ()

        def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self.batch = tuple(tensor.detach().clone() for tensor in args)

        def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                        raise Noticed("gradient")

        self._removable = [
            self.training.model.register_forward_pre_hook(keep),
            self.training.optimizer.register_step_pre_hook(look),
        ]


class LossAndSums(Variant):
    """The loss and one sum for each gradient, read together before the update."""

    def step(self) -> None:
        self.training.step(self._look)

    def _look(self, loss: torch.Tensor) -> None:
        if not math.isfinite(loss.item()):
            raise Noticed("loss")
        sums = [p.grad.sum() for p in self.training.model.parameters() if p.grad is not None]
        if not torch.isfinite(torch.stack(sums).sum()):
            raise Noticed("gradient")


VARIANTS: dict[str, type[Variant]] = {
    "control": Control,
    "reprokit": Reprokit,
    "reprokit_every_step": ReprokitEveryStep,
    "reprokit_record": ReprokitRecord,
    "reprokit_early": ReprokitEarly,
    "reprokit_within_10": ReprokitWithin10,
    "reprokit_within_3": ReprokitWithin3,
    "reprokit_within_1": ReprokitWithin1,
    "anomaly": Anomaly,
    "underflow_overflow": UnderflowOverflow,
    "leaf_hooks": LeafHooks,
    "norm_hooks": NormHooks,
    "three_ms_hook": ThreeMsHook,
    "clone_and_check": CloneAndCheck,
    "loss_and_sums": LossAndSums,
}


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Quadruples:
    """Seconds by one clock: of the two plain steps and of the two variant steps of each quadruple, added up."""

    plain: list[float] = field(default_factory=list)
    variant: list[float] = field(default_factory=list)

    def add(self, times: Sequence[float]) -> None:
        """``times`` are of plain, variant, variant, plain."""
        first, second, third, fourth = times
        self.plain.append(first + fourth)
        self.variant.append(second + third)

    def summary(self) -> JSON:
        """Median of the ratios with its 95% interval, mean of the trimmed times, and the step times in ms."""
        ratios = sorted(v / p for v, p in zip(self.variant, self.plain, strict=True))
        low, high = _interval(ratios)
        return {
            "median": statistics.median(ratios),
            "low": low,
            "high": high,
            "mean": self._mean(),
            "plain_ms": statistics.median(self.plain) / 2 * 1e3,
            "variant_ms": statistics.median(self.variant) / 2 * 1e3,
        }

    def _mean(self) -> float:
        """All time with the variant over all time without, the quadruples with the most extreme ratios left out."""
        pairs = sorted(zip(self.variant, self.plain, strict=True), key=lambda pair: pair[0] / pair[1])
        cut = int(len(pairs) * TRIM)
        kept = pairs[cut : len(pairs) - cut]
        return sum(v for v, _ in kept) / sum(p for _, p in kept)


def _interval(ordered: list[float]) -> tuple[float, float]:
    """A 95% interval of the median from order statistics; the whole range where there are too few values for one."""
    size, below, rank = len(ordered), 0, 0
    while rank < size // 2:
        below += math.comb(size, rank)  # of 2**size equally likely outcomes, those with at most `rank` values below
        if below * 40 > 2**size:
            break
        rank += 1
    position = max(rank - 1, 0)
    return ordered[position], ordered[size - 1 - position]


class Race:
    """Measures one variant on one training, a quadruple at a time."""

    def __init__(self, variant: Variant, cpu_clock: Callable[[], float], settles: bool) -> None:
        self.variant = variant
        self.cpu = Quadruples()
        self.wall = Quadruples()
        self.collector_us = 0.0
        self._cpu_clock = cpu_clock
        self._settles = settles

    def run_quadruple(self) -> None:
        """Plain, variant, variant, plain; after each switch comes a step that is not timed if steps are short."""
        plain = self.variant.training.step
        times = []
        self._settle(plain)
        times.append(self._timed(plain))
        self.variant.on()
        self._settle(self.variant.step)
        times.append(self._timed(self.variant.step))
        times.append(self._timed(self.variant.step))
        self.variant.off()
        self._settle(plain)
        times.append(self._timed(plain))
        self.cpu.add([cpu for cpu, _ in times])
        self.wall.add([wall for _, wall in times])

    def _settle(self, step: Callable[[], Any]) -> None:
        if self._settles:
            step()

    def _timed(self, step: Callable[[], Any]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), self._cpu_clock()
        step()
        return self._cpu_clock() - cpu, time.perf_counter() - wall

    def run_stretch(self, steps: int) -> None:
        """That many steps one after another with Python's garbage collector on, which alone is timed."""
        with _Collections() as collections:
            self.variant.on()
            for _ in range(steps):
                self.variant.step()
            self.variant.off()
        self.collector_us = collections.seconds / steps * 1e6

    def summary(self) -> JSON:
        """Everything that is reported of this variant."""
        return {
            "quadruples": len(self.cpu.plain),
            "cpu": self.cpu.summary(),
            "wall": self.wall.summary(),
            "collector_us": self.collector_us,
            **self.variant.describe(),
        }


class _Collections:
    """The seconds that Python's garbage collector takes while this context lasts; it starts with nothing to collect."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> _Collections:
        gc.collect()
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._started


@dataclass(frozen=True)
class Budget:
    """How long one shape is measured: ``rounds`` if given, else for about ``seconds``."""

    seconds: float
    rounds: int | None = None

    def numbers(self, spent: float, least: int) -> Iterator[int]:
        """Yield the number of each round; ``spent`` seconds are gone already, ``least`` rounds are always made."""
        if self.rounds is not None:
            yield from range(self.rounds)
            return
        end = time.perf_counter() + self.seconds - spent
        for number in itertools.count():
            if number >= least and time.perf_counter() >= end:
                return
            yield number


def measure(
    shape: str, names: Sequence[str], budget: Budget, cpu_clock: Callable[[], float], keeps_gc: bool = False
) -> JSON:
    """Measure variants on one shape. Those marked so run in every round, of the others some in turn."""
    started = time.perf_counter()
    trainings = {name: make(shape) for name in names}
    step_seconds = _typical_step(trainings[names[0]])
    settles = step_seconds < SETTLE_BELOW
    races = {name: Race(VARIANTS[name](trainings[name]), cpu_clock, settles) for name in names}
    for race in races.values():
        race.variant.warm_up(budget.seconds * 0.1)
    _race(races, budget, time.perf_counter() - started, keeps_gc)
    stretch = 3 if budget.rounds else min(LONGEST_STRETCH, int(budget.seconds / 2 / len(races) / step_seconds) + 1)
    for race in races.values():
        race.run_stretch(stretch)
    model = trainings[names[0]].model
    return {
        "step_ms": step_seconds * 1e3,
        "modules": len(list(model.modules())),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": trainings[names[0]].state_bytes(),
        "settled": settles,
        "stretch": stretch,
        "seconds": time.perf_counter() - started,
        "variants": {name: race.summary() for name, race in races.items()},
    }


def _race(races: dict[str, Race], budget: Budget, spent: float, keeps_gc: bool) -> None:
    """Let all variants run their quadruples, round by round."""
    always = [race for race in races.values() if race.variant.is_in_every_round]
    turns = [race for race in races.values() if not race.variant.is_in_every_round]
    per_round = -(-len(turns) // budget.rounds) if budget.rounds else min(1, len(turns))
    collected = time.perf_counter()
    with _collector(keeps_gc):
        for number in budget.numbers(spent, least=max(2, len(turns))):
            for race in always:
                race.run_quadruple()
            for offset in range(per_round):
                turns[(number * per_round + offset) % len(turns)].run_quadruple()
            if time.perf_counter() - collected > COLLECT_EVERY:
                gc.collect()
                collected = time.perf_counter()


def _typical_step(training: Training) -> float:
    """Seconds of one bare step, after a few to warm up."""
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])


@contextlib.contextmanager
def _collector(keeps_gc: bool) -> Iterator[None]:
    """Garbage is collected between rounds only, or, when ``keeps_gc``, whenever Python likes to."""
    gc.collect()
    gc.freeze()
    if not keeps_gc:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; prints the table and the JSON."""
    options = _parser().parse_args(argv)
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    torch.set_num_threads(options.threads)
    cpu_clock = time.thread_time if options.threads == 1 else time.process_time
    if options.quick:
        options.rounds = options.rounds or 2
    total = sum(SHARES[shape] for shape in options.shapes)
    result: JSON = {
        "schema": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": options.threads,
        "gc": options.gc,
        "shapes": {},
    }
    for shape in options.shapes:
        budget = Budget(1.0 if options.quick else options.seconds * SHARES[shape] / total, options.rounds)
        result["shapes"][shape] = measure(shape, options.variants, budget, cpu_clock, options.gc)
        print(table(shape, result["shapes"][shape]), file=sys.stderr, flush=True)
    print_json(result, options.json)
    if options.markdown is not None:
        options.markdown.write_text(markdown(result["shapes"]), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHARES, default=list(SHARES), metavar="SHAPE")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--seconds", type=float, default=330.0, help="for all shapes together (default 330)")
    parser.add_argument("--rounds", type=int, help="this many rounds for each shape, however long they take")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on while timing")
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that everything runs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the medians here as a Markdown table")
    return parser


def markdown(shapes: JSON) -> str:
    """The medians of the CPU ratios of all shapes with their intervals as one Markdown table."""
    heads = [f"{shape} ({result['step_ms']:.1f} ms)" for shape, result in shapes.items()]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in next(iter(shapes.values()))["variants"]:
        cells = []
        for result in shapes.values():
            cpu = result["variants"][name]["cpu"]
            cells.append(f"{cpu['median']:.3f} ({cpu['low']:.3f}–{cpu['high']:.3f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table(shape: str, result: JSON) -> str:
    """The results of one shape as text: medians of paired ratios with their intervals, and means."""
    lines = [
        f"{shape}: step {result['step_ms']:.2f} ms, {result['modules']} modules, {result['parameters']:,} parameters",
        f"  {'variant':20} {'cpu median':>10} {'95% interval':>15} {'cpu mean':>9} {'wall median':>11} {'n':>4}"
        f" {'gc us':>6} copies",
    ]
    for name, row in result["variants"].items():
        cpu, interval = row["cpu"], f"{row['cpu']['low']:.3f}-{row['cpu']['high']:.3f}"
        copies = f"{row['copies']} in {row['watched_steps']} steps" if "copies" in row else ""
        lines.append(
            f"  {name:20} {cpu['median']:10.4f} {interval:>15} {cpu['mean']:9.4f} {row['wall']['median']:11.4f}"
            f" {row['quadruples']:4} {row['collector_us']:6.1f} {copies}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
