"""The indices of the samples in a batch: those said are those used, for every way in which a loader draws them."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import reprokit
from reprokit.capture.failure_text import captured_lines
from reprokit.program.interpreter import run
from reprokit.render.facts import event_words, how_much, sample_words
from reprokit.rules.match import diagnose
from reprokit.snapshot.format import Snapshot, load
from tests.capture.traps_checks import update

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
SIZE, STEPS = 22, (1, 4, 6)
Loader = DataLoader[Any]


class Indexed(Dataset[Any]):
    """A row begins with its own index; a list of indices is a batch."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> torch.Tensor:
        given = torch.as_tensor(index, dtype=torch.float32)
        return torch.stack([given, given * 0 + 1], -1)


class Stored(Indexed):
    """The same without a torch call in ``__getitem__``."""

    def __getitem__(self, index: int) -> Any:
        return np.asarray([index, 1], dtype=np.float32)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Indexed()[list(range(SIZE))])


class Reversing:
    """A sampler of whole index batches, as an array or a tensor."""

    def __init__(self, make: Callable[[list[int]], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SIZE).tolist()
        yield from (self.make(order[place : place + 3]) for place in range(0, SIZE, 3))

    def __len__(self) -> int:
        return (SIZE + 2) // 3


@dataclass
class Pair:
    left: torch.Tensor
    right: dict[str, Any]


def by_value(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(sorted(rows, key=lambda row: float(row[0])))


def without_last(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows[:-1])


def as_pair(rows: list[torch.Tensor]) -> Pair:
    return Pair(torch.stack(rows), {"inner": (torch.stack(rows) * 1,)})


def epochs(loader: Loader, num: int = 4) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader, num))


def broken_off(loader: Loader) -> Iterator[Any]:
    """Leaves an epoch when workers have drawn more, and begins the next one."""
    for _ in range(8):
        yield from itertools.islice(loader, 2)


def one_ahead(loader: Loader) -> Iterator[Any]:
    """As accelerate does, to know the last batch."""
    for before, _ in itertools.pairwise(epochs(loader)):
        yield before


def both(loader: Loader) -> Iterator[Any]:
    other = DataLoader(Indexed(9), batch_size=4, shuffle=True)
    for first, second in zip(epochs(loader), epochs(other), strict=False):
        yield torch.cat([first, second * 1.0])


def with_validation(loader: Loader) -> Iterator[Any]:
    for x in epochs(loader):
        yield x
        sum(float(other.sum()) for other in itertools.islice(DataLoader(Indexed(), batch_size=7), 2))


def sharded(loader: Loader) -> Iterator[Any]:
    """As accelerate's loader, which is one ahead too."""
    shard = pytest.importorskip("accelerate.data_loader").DataLoaderShard
    options = {"num_workers": loader.num_workers, "multiprocessing_context": loader.multiprocessing_context}
    return epochs(shard(Indexed(), batch_size=5, shuffle=True, **options))


def train(batches: Iterable[Any]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for x in itertools.islice(batches, max(STEPS) + 1):
        x = x.left if isinstance(x, Pair) else x[0] if isinstance(x, list) else x
        update(optimizer, model(x.reshape(-1, 2)).pow(2).mean())


def saved(folder: Path, batches: Iterable[Any]) -> list[Snapshot]:
    torch.manual_seed(0)
    with reprokit.capture(folder / "s.pt", quiet=True, at_step=STEPS) as session:
        train(batches)
    return [load(path) for path in session.snapshots]


def used(snapshot: Snapshot, value: int) -> list[int]:
    """The indices that stand in the rows of a value of the step."""
    kept = run(snapshot.program, snapshot.tensors, keep=frozenset({value})).values
    tensor = snapshot.tensors[value] if value in snapshot.tensors else kept[value]
    return [int(row[0]) for row in tensor.reshape(-1, 2)]


WORKERS = {"num_workers": 1, "multiprocessing_context": "fork"}
IN_BATCHES = {"batch_size": 5, "shuffle": True}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("are_rows", "options", "iterate"),
    [
        (True, IN_BATCHES, epochs),
        (True, {**IN_BATCHES, "dataset": Stored()}, epochs),
        (True, {**IN_BATCHES, "dataset": TensorDataset(Indexed()[list(range(SIZE))])}, epochs),
        (True, {**IN_BATCHES, "drop_last": True, "persistent_workers": True}, broken_off),
        (True, {**IN_BATCHES, "prefetch_factor": 3}, one_ahead),
        (True, IN_BATCHES, both),
        (True, IN_BATCHES, sharded),
        (True, IN_BATCHES, with_validation),
        (True, {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 4, drop_last=False)}, epochs),
        (True, {"batch_sampler": Reversing(np.asarray)}, epochs),
        (True, {"batch_sampler": Reversing(list), "worker_init_fn": print}, epochs),
        (False, {"sampler": Reversing(torch.tensor), "batch_size": None}, epochs),
        (False, {**IN_BATCHES, "collate_fn": by_value}, epochs),
        (False, {**IN_BATCHES, "collate_fn": as_pair}, epochs),
        (False, {**IN_BATCHES, "collate_fn": without_last}, epochs),
        (False, {"batch_size": None, "shuffle": True}, epochs),
    ],
)
def test_samples_that_are_said_are_those_that_were_used(
    tmp_path: Path,
    are_rows: bool,
    options: dict[str, Any],
    iterate: Callable[[Loader], Iterator[Any]],
    num_workers: int,
) -> None:
    options = {"dataset": Indexed(), "num_workers": num_workers, **options}
    if num_workers == 0:
        options = {
            name: value for name, value in options.items() if name not in ("persistent_workers", "prefetch_factor")
        }
    else:
        options["multiprocessing_context"] = "fork"
    snapshots = saved(tmp_path, iterate(DataLoader(**options)))
    assert [snapshot.step for snapshot in snapshots] == list(STEPS)
    for snapshot in snapshots:
        assert snapshot.samples and {found.are_rows for found in snapshot.samples.values()} == {are_rows}
        for value, found in snapshot.samples.items():
            said, given = list(found.indices), used(snapshot, value)
            assert said == given if are_rows else set(given) <= set(said)
        told = json.loads(json.dumps(snapshot.summary()))["samples"]
        assert [(one["indices"], one["are_rows"]) for one in told] == [
            (list(found.indices), are_rows) for found in snapshot.samples.values()
        ]
        assert re.search(rf"samples? {said[0]}\b", sample_words(snapshot))


class Keyed(Indexed):
    def __getitem__(self, index: str) -> torch.Tensor:
        return super().__getitem__(int(index))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_watched_loader_gives_the_same_batches(tmp_path: Path, num_workers: int) -> None:
    def batches() -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        found = list(epochs(DataLoader(Indexed(), **IN_BATCHES, **(WORKERS if num_workers else {}))))
        return found, torch.get_rng_state()

    bare, state = batches()
    with reprokit.capture(tmp_path / "s.pt", quiet=True):
        watched, watched_state = batches()
    assert all(map(torch.equal, bare, watched)) and torch.equal(state, watched_state)
    assert len(bare) == len(watched) == 20


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": Indexed(), "batch_size": 5, "num_workers": 2, "in_order": False, "multiprocessing_context": "fork"},
        {"dataset": Streamed(), "batch_size": 5},
        {"dataset": Keyed(), "batch_sampler": [["3", "4"], ["1", "2"]]},
    ],
)
def test_nothing_is_said_where_nothing_is_sure(tmp_path: Path, options: dict[str, Any]) -> None:
    for snapshot in saved(tmp_path, epochs(DataLoader(**options))):
        assert snapshot.samples is None and "samples" not in snapshot.summary()


def test_an_iterator_that_began_unseen_is_not_followed(tmp_path: Path) -> None:
    loader = DataLoader(Indexed(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    iterator = iter(loader)
    for snapshot in saved(tmp_path, iterator):
        assert snapshot.samples is None
    iterator = iter(loader)
    torch.manual_seed(0)
    with reprokit.capture(tmp_path / "paused.pt", quiet=True, at_step=STEPS) as session:
        session.pause()
        next(iterator)
        session.resume()
        train(iterator)
    assert all(load(path).samples is None for path in session.snapshots)


class Faulty(Dataset[Any]):
    """Pairs of a row and its sum; sample ``BAD`` is wrong: by calls of the data set, in its memory, or with a label."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.x = torch.randn(800, 16, generator=torch.Generator().manual_seed(3))
        self.y = self.x.sum(1, keepdim=True)
        if how == "label":
            self.y[BAD] *= 1e4
        elif how == "nan":
            self.x[BAD, 2] = math.nan
        elif how == "zero":
            self.x[BAD] = 0

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        factor = {"call": 1e3, "infinite": 1e39}.get(self.how, 1.0)
        return (x * factor if index == BAD and factor > 1 else x), self.y[index]


BAD = 423


def fitted(folder: Path, how: str, **options: Any) -> Snapshot:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with contextlib.suppress(SystemExit), reprokit.capture(folder / "s.pt", quiet=True, on=("nonfinite", "spike")):
        for x, y in epochs(DataLoader(Faulty(how), batch_size=8, shuffle=True, **options)):
            half = x.double().float() / 2
            loss = (model(2 * half) - y).pow(2).mean()
            update(optimizer, loss + half.square().sum(1).log().mean() if how == "zero" else loss)
    return load(folder / "s.pt")


def as_stacked(pairs: list[Any]) -> Any:
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


@pytest.mark.parametrize("options", [{}, WORKERS])
def test_rows_that_carry_an_event_are_named_with_their_samples(tmp_path: Path, options: dict[str, Any]) -> None:
    """Without workers the odd value is one that the data set has made of one sample: its rows are none of a batch."""
    snapshot = fitted(tmp_path, "label", **options)
    event, samples = snapshot.failure.event, snapshot.samples
    assert event is not None and samples and snapshot.cause is not None
    row = next(iter(samples.values())).indices.index(BAD)
    assert (event.rows, event.samples) == (f"row {row}" if options else None, f"sample {BAD}")
    assert f"in row {row} (sample {BAD}) of step {snapshot.step}" in snapshot.cause.text
    assert (
        f"row {row} (sample {BAD}) of `y`" in event_words(snapshot) if options else "row" not in event_words(snapshot)
    )


def test_rows_of_a_single_sample_are_not_told_as_those_of_the_batch(tmp_path: Path) -> None:
    event = fitted(tmp_path, "call").failure.event
    assert event is not None and (event.rows, event.samples) == (None, f"sample {BAD}")


def test_row_that_was_computed_of_a_batch_is_named_with_its_sample(tmp_path: Path) -> None:
    snapshot = fitted(tmp_path, "zero", **WORKERS)
    row = next(iter((snapshot.samples or {}).values())).indices.index(BAD)
    assert how_much(snapshot).startswith(
        f"1 of 8 elements is -inf, first at [{row}]; row {row} of `x` and `y` is sample {BAD}"
    )


@pytest.mark.parametrize("collate_fn", [None, as_stacked])
def test_bad_rows_of_an_input_are_named_with_their_samples(tmp_path: Path, collate_fn: Any) -> None:
    """A ``collate_fn`` of the user's may sort them: of its rows no sample is named."""
    snapshot = fitted(tmp_path, "nan", collate_fn=collate_fn, **WORKERS)
    assert snapshot.samples
    row = next(iter(snapshot.samples.values())).indices.index(BAD)
    where = f"row {row} (sample {BAD})" if collate_fn is None else f"row {row}"
    assert how_much(snapshot) == f"1 of 128 elements is nan, first at [{row}, 2]: {where}"
    assert diagnose(snapshot).evidence[0].endswith(f"is not finite: {where}")
    assert f"  in {where}" in captured_lines(tmp_path / "s.pt", snapshot.summary(), None)


def test_the_sample_that_a_call_of_the_data_set_made_bad_is_named(tmp_path: Path) -> None:
    snapshot = fitted(tmp_path, "infinite")
    assert snapshot.failure.call == "torch.Tensor.mul" and snapshot.bad_rows == f"sample {BAD}"


def test_a_bad_input_of_a_single_number_has_no_rows(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    with contextlib.suppress(SystemExit), reprokit.capture(tmp_path / "s.pt", quiet=True):
        for factor in (1.0, math.nan):
            update(torch.optim.SGD([weight], lr=0.1), (weight * torch.from_numpy(np.array(factor))).sum())
    snapshot = load(tmp_path / "s.pt")
    assert snapshot.failure.is_given and snapshot.bad_rows == ""


def test_rows_of_a_batch_that_no_loader_gave_have_no_samples(tmp_path: Path) -> None:
    """`float` returns its argument: the call that made it is that argument's own."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with contextlib.suppress(SystemExit), reprokit.capture(tmp_path / "s.pt", quiet=True):
        for step in range(8):
            x = torch.full((8, 4), 0.5)
            x[2:4] *= 1e30 if step == 6 else 1
            update(optimizer, model(x.float()).pow(2).mean())
    snapshot = load(tmp_path / "s.pt")
    assert snapshot.samples is None and snapshot.cause is not None
    assert "in rows 2-3 of step 6" in snapshot.cause.text


def test_an_empty_sequence_is_named_by_its_row_and_sample(tmp_path: Path) -> None:
    """`pack_padded_sequence` sorts the lengths first."""
    lengths = torch.tensor([3, 1, 2, 3, 0, 2, 1, 3])
    torch.manual_seed(0)
    model = nn.LSTM(4, 2, batch_first=True)
    with contextlib.suppress(RuntimeError), reprokit.capture(tmp_path / "s.pt", quiet=True):
        for x, n in DataLoader(TensorDataset(torch.ones(8, 3, 4), lengths), batch_size=4):
            packed = pack_padded_sequence(x * model.weight_ih_l0.sum(), n, batch_first=True, enforce_sorted=False)
            model(packed)[0].data.sum().backward()
    snapshot = load(tmp_path / "s.pt")
    assert diagnose(snapshot).evidence[0] == "1 of 4 lengths is zero or less: row 0 (sample 4)"
