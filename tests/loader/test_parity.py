"""Parity with torch: our loader yields what torch's yields, bit for bit, on every backend.

A cell of the grid is a dataset, some options and a number of workers. torch's loader and ours run it
over some epochs, each from the same seeds, and both runs are written down as a list of events: every
index that the sampler gave, every batch with its types and dtypes, every error, what the training
loop itself drew between two batches, and the states of all random generators of the main process
at the end of each epoch. The two lists must be equal. Threads share the global generators with
the training loop, so cells whose workers draw from these leave threads out.
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from support.parity_cases import (
    MAP_OPTIONS,
    MAPS,
    OPEN_ENDED,
    PIPES,
    STREAM_OPTIONS,
    STREAMS,
    WORKER_OPTIONS,
    Log,
    Logged,
    Made,
    Options,
    Pair,
    number,
)

import hybridloader
from hybridloader import Ray, Spawn, Threads, from_torch, install

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # 3 workers, 2 CPUs
    pytest.mark.filterwarnings("ignore:`shuffle=True` was set, but the datapipe"),
]

# -- writing down a run ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Dataset and options of both loaders.

    Attributes
    ----------
    draws
        Whether the workers draw from the global generators.
    copies
        Whether the workers change the dataset, so that threads need copies of it.
    stop_after
        Batches after which the training loop breaks off each epoch; 0: it never does.
    """

    name: str
    dataset: Callable[[], Any]
    options: Options
    workers: int
    draws: bool = False
    copies: bool = False
    stop_after: int = 0

    def run(self, loader_class: Any, **more: Any) -> Log:
        """Return the events of all epochs: three for persistent workers, two for others."""
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        log: Log = []
        options = self.options(log)
        loader = loader_class(self.dataset(), num_workers=self.workers, **options, **more)
        try:
            log.append(("length", len(loader)))
        except TypeError:
            log.append("no length")
        for _ in range(3 if loader.persistent_workers else 2):
            log.append("epoch")
            self._epoch(log, iter(loader))
            if "error" in {event[0] for event in log}:
                gc.collect()  # an exception of torch's holds its iterator in a cycle
            log.append(("generators", *states(loader.generator)))
        return log

    def _epoch(self, log: Log, iterator: Any) -> None:
        batches = 0
        while not self.stop_after or batches < self.stop_after:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                log.append(("error", type(error).__name__))
            else:
                log.append(("batch", canonical(batch)))
            batches += 1
            log.append(("training", random.random(), np.random.random(), float(torch.rand(()))))
        else:
            return
        log.append(("after the end", next(iterator, "StopIteration")))


@cache
def oracle(cell: Cell) -> Log:
    """Run torch's loader."""
    return cell.run(torch.utils.data.DataLoader)


def states(generator: torch.Generator | None) -> tuple[str, ...]:
    """The states of the global generators and of the loader's own, as digests."""
    python = repr(random.getstate()).encode()
    numpy = repr([np.asarray(part).tolist() for part in np.random.get_state()[1:]]).encode()
    tensors = [torch.get_rng_state()] + ([] if generator is None else [generator.get_state()])
    parts = [python, numpy, *(tensor.numpy().tobytes() for tensor in tensors)]
    return tuple(hashlib.blake2b(part, digest_size=8).hexdigest() for part in parts)


def canonical(value: Any) -> Any:
    """Everything that a user could tell two values apart by, in plain comparable parts."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense().resolve_conj().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        traits = (value.layout, value.requires_grad, value.is_leaf)
        return kind, value.dtype, tuple(value.shape), traits, data
    if isinstance(value, np.ma.MaskedArray):
        return kind, canonical(value.data), canonical(value.mask)
    if isinstance(value, np.ndarray):
        data = value.tolist() if value.dtype.hasobject else value.tobytes()
        order = value.flags.f_contiguous and not value.flags.c_contiguous
        return kind, value.dtype.descr, value.shape, order, value.flags.writeable, data
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        return kind, [(canonical(key), canonical(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [canonical(item) for item in value]
    if isinstance(value, float):
        return kind, value.hex()
    return kind, value


def assert_same(ours: Log, theirs: Log, where: str = "") -> None:
    """Equal, or a failure that shows the first difference and what led to it."""
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    first = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    before = "\n  ".join(str(event)[:200] for event in theirs[max(0, first - 6) : first])
    pytest.fail(
        f"{where}: event {first} differs, after\n  {before}\n"
        f"torch: {str(theirs[first : first + 3])[:800]}\nours:  {str(ours[first : first + 3])[:800]}",
        pytrace=False,
    )


# -- the grid --------------------------------------------------------------------------------------


def cell(data: str, options: str, workers: int, more: str = "", stop: int = 0) -> Cell:
    chosen = (MAP_OPTIONS if data in MAPS or data.startswith("map-pipe") else STREAM_OPTIONS)[
        options
    ]
    if more:
        chosen = partial(_with_more, chosen, WORKER_OPTIONS[more])
    name = "+".join(filter(None, (data, options, more, f"{workers}w", f"stop{stop}" * bool(stop))))
    return Cell(
        name,
        (MAPS | STREAMS | PIPES | OPEN_ENDED)[data],
        chosen,
        workers,
        draws="draw" in data,
        copies=data == "remembering" or "marked" in more,
        stop_after=stop,
    )


def _with_more(options: Options, more: dict[str, Any], log: Log) -> dict[str, Any]:
    return {**options(log), **more}


SHORT = {"subset", "concat", "empty"}
"""Datasets that lack some of the indices which the samplers of the options give."""

ANY_LENGTH = {"batches", "defaults", "drop-last", "generator", "single", "kept", "collate"}

ODD = ("odd-tensors", "odd-arrays")
"""Datasets whose samples make no batch."""


def cells_without_workers() -> list[Cell]:
    """Every dataset with every option."""
    cells = [
        cell(data, options, 0)
        for data in MAPS
        for options in MAP_OPTIONS
        if (data not in SHORT or options in ANY_LENGTH) and (data not in ODD or options == "kept")
    ]
    cells += [cell(data, o, 0) for data in STREAMS for o in STREAM_OPTIONS if o != "shuffle"]
    cells += [
        cell(data, options, 0)
        for data in PIPES
        for options in ("batches", "defaults", "drop-last", "shuffle", "generator")
        if (data, options) != ("pipe-batched", "shuffle")
    ]
    stops = ("ints", "drawn", "fragile", "stream", "drawing", "pipe-shuffled", "endless")
    return cells + [cell(data, "generator", 0, stop=2) for data in stops]


def cells_with_workers() -> list[Cell]:
    """What workers add: who draws what when, what stays with them, and in which order batches come.

    What becomes of samples and batches is the same without them, where every dataset meets every option.
    """
    maps = ("ints", "dicts", "large", "getitems", "remembering", "fragile", "empty", "drawn")
    cells = [cell(data, "batches", 2) for data in maps]
    cells += [cell(data, "kept", 2) for data in ODD]
    drawn = ("shuffle", "shuffle-generator", "generator", "random-batches")
    cells += [cell("drawn", options, 2) for options in drawn]
    everyday = ("prefetch-1", "persistent", "init-fn", "persistent-init-fn")
    cells += [cell("drawn", "batches", 2, more) for more in everyday]
    cells += [cell("remembering", "batches", 2, more) for more in ("persistent", "marked")]
    cells += [cell("remembering", "batches", 2, "persistent-marked")]
    cells += [cell("ints", "sampler", 2, more) for more in ("prefetch-5", "persistent")]
    cells += [cell("ints", o, 2, "prefetch-1") for o in ("batch-sampler", "single-sampler")]
    cells += [cell("drawn", "shuffle-generator", 2, "persistent")]
    cells += [cell("drawn", "shuffle", 1, "persistent")]
    cells += [cell("fragile", "sampler", 3, "prefetch-1")]

    streams = ("unequal", "one-is-empty", "fragile-stream", "no-stream", "sized", "drawing")
    cells += [cell(data, "batches", 2) for data in streams]
    cells += [cell(data, "drop-last", 2) for data in ("unequal", "fragile-stream")]
    cells += [cell("one-is-empty", "single", 3, "prefetch-1"), cell("unequal", "single", 2)]
    cells += [cell("unequal-drawing", "generator", 2)]
    cells += [cell("unequal-drawing", "drop-last", 2, "persistent-init-fn")]
    cells += [cell("unequal-drawing", "batches", 3, "persistent")]
    cells += [cell("epochs", "batches", 2, more) for more in ("persistent", "persistent-marked")]

    pipes = ("pipe-shuffled", "pipe-shuffled-late", "pipe-drawing", "map-pipe-shuffled")
    cells += [cell(data, "batches", 2) for data in pipes]
    cells += [cell("pipe-shuffled", "shuffle", 2, "persistent")]
    cells += [cell("pipe-drawing", "no-shuffle", 2, "persistent")]
    cells += [cell("pipe-shuffled", "single", 3, "persistent-prefetch-1")]
    cells += [cell("pipe-shuffled", "batches", 2, "seeded-pipe")]
    cells += [cell("pipe-drawing", "batches", 2, "persistent-seeded-pipe")]

    cells += [cell(data, "generator", 2, stop=2) for data in ("drawn", "drawing", "pipe-shuffled")]
    # Without what the workers remember or draw: see the last tests of this file.
    return cells + [cell(data, "generator", 2, "persistent", stop=2) for data in ("ints", "epochs")]


def backends(number: int, cell: Cell) -> Iterator[Any]:
    """The backends that a cell is run on: one of those that fork, which takes its time, and more."""
    yield (None, "fork", "shared-memory")[number % 3]
    yield "inline"
    if not cell.draws:
        yield Threads(copy_dataset=True) if cell.copies else "threads"
    if cell.name in SPAWNED:
        yield "spawn"
    if cell.name in EACH_BY_ITSELF:
        yield Spawn(preload=False)


SPAWNED = {
    "drawn+shuffle-generator+persistent+2w",
    "unequal-drawing+drop-last+persistent-init-fn+2w",
}

EACH_BY_ITSELF = {"drawn+shuffle-generator+persistent+2w"}
"""Of these, cells whose fresh workers are started each by itself."""

ON_RAY = {
    "drawn+shuffle-generator+persistent+2w",
    "remembering+batches+persistent-marked+2w",
}
"""Of these, cells that run on Ray each time; the rest of the grid is marked `full` there."""

GRID = {cell: tuple(backends(number, cell)) for number, cell in enumerate(cells_with_workers())}
ALONE = cells_without_workers()


def name_of(backend: Any) -> str:
    if isinstance(backend, Spawn):
        return "fresh"
    return backend if isinstance(backend, str) else "default" if backend is None else backend.name


@pytest.mark.parametrize("data", list(MAPS | STREAMS | PIPES | OPEN_ENDED))
def test_without_workers_a_run_is_the_same_as_with_torch(data: str) -> None:
    mine = [cell for cell in ALONE if cell.name.startswith(f"{data}+")]
    for cell in mine:
        assert_same(cell.run(hybridloader.DataLoader), oracle(cell), cell.name)
    assert mine


@pytest.mark.parametrize("cell", GRID, ids=lambda cell: cell.name)
def test_with_workers_a_run_is_the_same_as_with_torch(cell: Cell) -> None:
    for backend in GRID[cell]:
        ours = cell.run(hybridloader.DataLoader, backend=backend)
        assert_same(ours, oracle(cell), name_of(backend))


def converted(*args: Any, **options: Any) -> Any:
    return from_torch(torch.utils.data.DataLoader(*args, **options), "inline")


@pytest.mark.parametrize(
    "cell",
    [
        *[cell for cell in GRID if not (cell.draws or cell.copies)][::2],
        *(cell(data, "shuffle", 0) for data in ("drawn", "pipe-drawing")),
    ],
    ids=lambda cell: cell.name,
)
def test_torchs_own_loaders_are_the_same_converted_or_on_our_engine(cell: Cell) -> None:
    wanted = oracle(cell)
    assert_same(cell.run(converted), wanted, "from_torch")
    with install("threads"):
        assert_same(cell.run(torch.utils.data.DataLoader), wanted, "install")


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=cell.name, marks=() if cell.name in ON_RAY else pytest.mark.full)
        for cell in GRID
    ],
)
def test_on_ray_a_run_is_the_same_as_with_torch(cell: Cell) -> None:
    ours = cell.run(hybridloader.DataLoader, backend=Ray(num_cpus=0.1))
    assert_same(ours, oracle(cell), "ray")


# -- beyond the grid -------------------------------------------------------------------------------


def in_any_order(log: Log) -> list[Counter[str]]:
    """For each epoch, the batches with how often they came."""
    epochs: list[Counter[str]] = []
    for event in log:
        if event == "epoch":
            epochs.append(Counter())
        elif event[0] == "batch":
            epochs[-1][str(event)] += 1
    return epochs


@pytest.mark.parametrize(
    ("cell", "backend"),
    [
        (cell("ints", "shuffle-generator", 2, "persistent"), None),
        (cell("unequal", "drop-last", 2, "persistent-prefetch-1"), None),
        (cell("stream", "single", 3), "threads"),
        (cell("pipe-shuffled", "batches", 2, "persistent"), "threads"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_out_of_order_the_same_batches_come(cell: Cell, backend: Any) -> None:
    ours = cell.run(hybridloader.DataLoader, backend=backend, in_order=False)
    assert in_any_order(ours) == in_any_order(oracle(cell))
    assert all(in_any_order(ours))


@pytest.mark.parametrize("backend", [None, "inline"])
@pytest.mark.parametrize("data", ["drawn", "drawing"])
def test_out_of_order_one_worker_keeps_the_order(data: str, backend: Any) -> None:
    alone = cell(data, "generator", 1)
    ours = alone.run(hybridloader.DataLoader, backend=backend, in_order=False)
    assert_same(ours, alone.run(torch.utils.data.DataLoader, in_order=False))


@pytest.mark.parametrize(
    ("data", "workers", "backend"),
    [
        ("pipe-shuffled", 0, None),
        ("pipe-shuffled", 2, None),
        ("pipe-shuffled", 2, "threads"),
        ("pipe", 2, "threads"),
        ("map-pipe", 2, "threads"),
    ],
)
def test_a_rank_reads_its_part_of_a_pipe_as_with_torch(
    data: str, workers: int, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cell(data, "batches", workers)
    all_of_it = oracle(whole)
    monkeypatch.setattr("torch.utils.data.dataloader._get_distributed_settings", lambda: (2, 1))
    ours = whole.run(hybridloader.DataLoader, backend=backend)
    part = _oracle_of_rank_1(whole)
    assert_same(ours, part)
    if data != "map-pipe":
        assert part != all_of_it


@cache
def _oracle_of_rank_1(cell: Cell) -> Log:
    return cell.run(torch.utils.data.DataLoader)


@pytest.mark.parametrize("backend", [None, "inline", "threads"])
def test_two_iterators_at_once_are_as_with_torch(backend: Any) -> None:
    def interleaved(loader_class: Any, **more: Any) -> Log:
        torch.manual_seed(5)
        log: Log = []
        sampler = Logged(log, range(8))
        loader = loader_class(Made(number), 2, sampler=sampler, num_workers=1, **more)
        one = iter(loader)
        log.append(canonical(next(one)))
        two = iter(loader)
        for _ in range(3):
            log.extend((canonical(next(two)), canonical(next(one))))
        return log

    assert_same(
        interleaved(hybridloader.DataLoader, backend=backend),
        interleaved(torch.utils.data.DataLoader),
    )


@pytest.mark.parametrize("backend", [None, "inline", "threads"])
def test_two_epochs_begun_without_a_batch_taken_are_as_with_torch(backend: Any) -> None:
    def restless(loader_class: Any, **more: Any) -> Log:
        log: Log = []
        sampler = Logged(log, range(6))
        loader = loader_class(
            Made(number), 1, sampler=sampler, num_workers=2, persistent_workers=True, **more
        )
        for _ in range(3):
            iterator = iter(loader)
        log.extend(canonical(batch) for batch in iterator)
        return log

    assert_same(
        restless(hybridloader.DataLoader, backend=backend), restless(torch.utils.data.DataLoader)
    )


@pytest.mark.parametrize("data", ["drawn", "remembering"])
def test_after_a_break_persistent_workers_are_where_torch_has_them(data: str) -> None:
    """torch's workers finish what was sent to them, so what they draw next can be foretold."""
    broken_off = cell(data, "generator", 2, "persistent", stop=2)
    assert_same(broken_off.run(hybridloader.DataLoader, backend="inline"), oracle(broken_off))


def test_the_comparison_tells_apart_what_a_user_could() -> None:
    different = [
        1, 1.0, True, np.int64(1), np.float64(1), "1", (1,), [1], {1}, {1: 1}, Pair(1, 1), (1, 1),
        torch.tensor(1), torch.tensor(1.0), torch.tensor([1]), torch.tensor(1.0).bfloat16(),
        torch.tensor(1.0).requires_grad_(), torch.nn.Parameter(torch.tensor(1.0)),
        np.array(1), np.array(1, dtype=np.int16), np.array([1]), np.array(["1"]), None, 0.0, -0.0,
        np.eye(2), np.asfortranarray(np.eye(2)), {"a": 1, "b": 2}, {"b": 2, "a": 1},
    ]  # fmt: skip
    seen = [str(canonical(value)) for value in different]
    assert len(set(seen)) == len(seen)
    with pytest.raises(pytest.fail.Exception, match="event 1 differs"):
        assert_same(["epoch", ("batch", 1)], ["epoch", ("batch", 2)])
    with pytest.raises(pytest.fail.Exception, match="event 1 differs"):
        assert_same(["epoch"], ["epoch", ("batch", 2)])
