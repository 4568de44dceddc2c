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
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

import hybridloader
from hybridloader import Ray, Threads, from_torch, install

LENGTH = 11
"""Samples of a dataset: a prime, so that no batch size and no number of workers divides it."""

# -- datasets that are asked by index --------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


class Made(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], length: int = LENGTH) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Batchwise(Made):
    """Asked for a whole batch at once; what it gives tells that it was."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.make(index), len(indices)) for index in indices]


class Remembering(Made):
    """Counts what it was asked for: tells whose copy it is, and for how long it lives."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return index, self.asked


class Duck:
    """No subclass of torch's `Dataset`."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return -index


def number(index: int) -> int:
    return 10 * index


def tensor(index: int) -> torch.Tensor:
    return torch.full((2, 3), index + 0.5, dtype=torch.float64)


def array(index: int) -> np.ndarray[Any, Any]:
    return np.full((3,), index, dtype=np.int16)


def mapping(index: int) -> dict[str, Any]:
    return {"x": tensor(index), "y": index, "name": f"n{index}", "in": {"z": array(index)}}


def pair(index: int) -> Pair:
    return Pair(array(index), (index, float(index)))


def text(index: int) -> str:
    return "ab" * index


def large(index: int) -> torch.Tensor:
    """Beyond the size from which buffers travel apart from the rest of a batch."""
    return torch.arange(9_000, dtype=torch.int32).roll(index)


def odd_tensor(index: int) -> Any:
    """Tensors and arrays that differ in more than their values."""
    base = torch.arange(24.0).view(2, 3, 4) + index
    kinds: list[Any] = [
        torch.tensor(index),
        base.bfloat16(),
        base.half().permute(2, 0, 1),
        base.expand(5, 2, 3, 4),
        torch.empty(0, 3, dtype=torch.bool),
        torch.complex(base, base),  # torch's workers lose the flag of a .conj()
        torch.nn.Parameter(base),
        base.clone().requires_grad_(),
        torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        np.asfortranarray(base.numpy()),
    ]
    return kinds[index % len(kinds)]


def odd_array(index: int) -> Any:
    kinds: list[Any] = [
        np.float32(index),
        np.array(index),
        np.array(["a", "bcd"]),
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        np.array([None, index], dtype=object),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.arange(20)[::-2],
        np.broadcast_to(np.int8(3), (2, 2)).copy(),
        np.bool_(True),
        np.arange(4, dtype="<u2"),  # torch's workers swap the bytes of a ">u2"
    ]
    return kinds[index % len(kinds)]


def drawn(index: int) -> tuple[int, int, float, float, float]:
    """Draws from all three global generators."""
    seed = torch.initial_seed() % 1_000_003
    return index, seed, random.random(), float(np.random.random()), float(torch.rand(()))


def fragile(index: int) -> int:
    if index in (4, 7):
        raise KeyError(f"sample {index} is broken")
    return index


MAPS: dict[str, Callable[[], Any]] = {
    "ints": partial(Made, number),
    "tensors": partial(Made, tensor),
    "arrays": partial(Made, array),
    "dicts": partial(Made, mapping),
    "namedtuples": partial(Made, pair),
    "strings": partial(Made, text),
    "large": partial(Made, large),
    "drawn": partial(Made, drawn),
    "getitems": partial(Batchwise, number),
    "remembering": partial(Remembering, number),
    "duck": Duck,
    "empty": partial(Made, number, 0),
    "fragile": partial(Made, fragile),
    "subset": lambda: Subset(Made(tensor), [5, 1, 5, 0, 7]),
    "concat": lambda: ConcatDataset([Made(number, 4), Made(number, 0), Made(number, 3)]),
    "odd-tensors": partial(Made, odd_tensor),
    "odd-arrays": partial(Made, odd_array),
    "tensordataset": lambda: TensorDataset(torch.arange(LENGTH), torch.eye(LENGTH)),
}

# -- datasets that are iterated --------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Items ``id, id + k, ...`` in worker `id` of `k`, made by a function of their number."""

    def __init__(self, make: Callable[[int], Any], length: int = LENGTH) -> None:
        self.make, self.length, self.epoch = make, length, 0

    def shard(self) -> range:
        info = get_worker_info()
        if info is None:
            return range(self.length)
        return range(info.id, self.length, info.num_workers)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return (self.make(item) for item in self.shard())


class Unequal(Stream):
    """Worker 0 has one item, worker 1 has 7, worker 2 has 13."""

    def shard(self) -> range:
        info = get_worker_info()
        first = 0 if info is None else 100 * info.id
        return range(first, first + 1 + 6 * (first // 100))


class OneIsEmpty(Stream):
    """Worker 0 has nothing at all."""

    def shard(self) -> range:
        info = get_worker_info()
        return range(0 if info is None or info.id == 0 else 5)


class Epochs(Stream):
    """Tells how often it was iterated: the worker's copy, and whether the worker still lives."""

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        info = get_worker_info()
        who = (-1, 0) if info is None else (info.id, info.num_workers)
        return iter([(self.epoch, *who)] * 4)


class Endless(Stream):
    """Keeps its iterator, as one over a socket or a queue does: each pass goes on behind the last."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__(make, 0)
        self.source = (make(number) for number in range(1 << 60))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


class Unsharded(Stream):
    def shard(self) -> range:
        return range(self.length)


STREAMS: dict[str, Callable[[], Any]] = {
    "stream": partial(Stream, number),
    "unequal": partial(Unequal, tensor),
    "one-is-empty": partial(OneIsEmpty, number),
    "epochs": partial(Epochs, number),
    "sized": partial(Sized, mapping),
    "unsharded": partial(Unsharded, number),
    "drawing": partial(Stream, drawn),
    "unequal-drawing": partial(Unequal, drawn),
    "fragile-stream": partial(Stream, fragile),
    "no-stream": partial(Stream, number, 0),
    "chain": lambda: ChainDataset([Stream(number, 3), Stream(number, 5)]),
}

OPEN_ENDED: dict[str, Callable[[], Any]] = {"endless": partial(Endless, number)}
"""Streams for passes that are broken off."""

# -- data pipes ------------------------------------------------------------------------------------


def wrapped(length: int = 13) -> Any:
    return IterableWrapper(range(length))


PIPES: dict[str, Callable[[], Any]] = {
    "pipe": lambda: wrapped().sharding_filter().map(number),
    "pipe-shuffled": lambda: wrapped().shuffle().sharding_filter(),
    "pipe-shuffled-late": lambda: wrapped().sharding_filter().map(number).shuffle(buffer_size=3),
    "pipe-unsharded": lambda: wrapped(5).shuffle(),
    "pipe-unshuffled": lambda: wrapped(5).map(number),
    "pipe-drawing": lambda: wrapped().shuffle().sharding_filter().map(drawn),
    "pipe-batched": lambda: wrapped().sharding_filter().batch(2),
    "map-pipe": lambda: SequenceWrapper(range(LENGTH)).map(number),
    "map-pipe-drawing": lambda: SequenceWrapper(range(LENGTH)).map(drawn),
    "map-pipe-shuffled": lambda: SequenceWrapper(range(LENGTH)).shuffle().map(number),
}

# -- samplers and functions ------------------------------------------------------------------------

Log = list[Any]


class Logged(Sampler[int]):
    """Writes down when it is asked to begin, what it gives, and when it ends."""

    def __init__(self, log: Log, indices: Any) -> None:
        self.log, self.indices = log, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        self.log.append("sampler begins")
        return self._walk()

    def _walk(self) -> Iterator[Any]:
        for index in self.indices:
            self.log.append(("sampler gives", index))
            yield index
        self.log.append("sampler ends")


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def count(samples: list[Any]) -> tuple[int, list[Any]]:
    return len(samples), samples


def reseed(worker: int) -> None:
    """Seed numpy and random from torch, as users write it."""
    seed = (torch.initial_seed() + worker) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed + 1)


def mark(worker: int) -> None:
    """Changes the worker's own copy of the dataset."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.make = partial(_marked, worker, info.seed % 1_000_003)


def seed_pipe(worker: int) -> None:
    """Seeds the shufflers itself, and leaves each worker every second item of its own shard."""
    info = get_worker_info()
    assert info is not None
    for pipe in get_all_graph_pipes(traverse_dps(info.dataset)):  # type: ignore[arg-type]
        if hasattr(pipe, "set_seed"):
            pipe.set_seed(100 + worker)
        if hasattr(pipe, "apply_sharding"):
            assert (pipe.num_of_instances, pipe.instance_id) == (info.num_workers, worker)
            pipe.apply_sharding(2 * info.num_workers, worker)


def _marked(worker: int, seed: int, index: int) -> tuple[int, int, int]:
    return worker, seed, index


def keep(samples: Any) -> Any:
    return samples


Options = Callable[[Log], dict[str, Any]]

MAP_OPTIONS: dict[str, Options] = {
    "batches": lambda log: {"batch_size": 3},
    "defaults": lambda log: {},
    "drop-last": lambda log: {"batch_size": 4, "drop_last": True},
    "shuffle": lambda log: {"batch_size": 3, "shuffle": True},
    "shuffle-generator": lambda log: {"batch_size": 3, "shuffle": True, "generator": seeded()},
    "generator": lambda log: {"batch_size": 3, "generator": seeded()},
    "single": lambda log: {"batch_size": None},
    "kept": lambda log: {"batch_size": None, "collate_fn": keep},
    "single-sampler": lambda log: {"batch_size": None, "sampler": Logged(log, [3, 1, 1, 2])},
    "sampler": lambda log: {"batch_size": 2, "sampler": Logged(log, range(9, 0, -1))},
    "list-sampler": lambda log: {"batch_size": 2, "sampler": [8, 2, 5]},
    "batch-sampler": lambda log: {"batch_sampler": Logged(log, [[1, 2], [3], [4, 5, 6], [7, 0]])},
    "random-batches": lambda log: {
        "batch_sampler": BatchSampler(RandomSampler(range(10), generator=seeded()), 4, True)
    },
    "weighted-generator": lambda log: {
        "batch_size": 3,
        "sampler": WeightedRandomSampler([1.0, 2, 3], 7, generator=seeded()),
    },
    "replacement": lambda log: {
        "batch_size": 3,
        "sampler": RandomSampler(range(10), replacement=True, num_samples=13),
    },
    "collate": lambda log: {"batch_size": 3, "collate_fn": count},
}

STREAM_OPTIONS: dict[str, Options] = {
    "batches": lambda log: {"batch_size": 3},
    "defaults": lambda log: {},
    "drop-last": lambda log: {"batch_size": 3, "drop_last": True},
    "single": lambda log: {"batch_size": None},
    "generator": lambda log: {"batch_size": 2, "generator": seeded()},
    "collate": lambda log: {"batch_size": 4, "collate_fn": count},
    "shuffle": lambda log: {"batch_size": 2, "shuffle": True, "generator": seeded()},  # pipes only
    "no-shuffle": lambda log: {"batch_size": 2, "shuffle": False},
}

WORKER_OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch-1": {"prefetch_factor": 1},
    "prefetch-5": {"prefetch_factor": 5},
    "persistent": {"persistent_workers": True},
    "persistent-prefetch-1": {"persistent_workers": True, "prefetch_factor": 1},
    "init-fn": {"worker_init_fn": reseed},
    "persistent-init-fn": {"worker_init_fn": reseed, "persistent_workers": True},
    "marked": {"worker_init_fn": mark},
    "persistent-marked": {"worker_init_fn": mark, "persistent_workers": True},
    "seeded-pipe": {"worker_init_fn": seed_pipe},
    "persistent-seeded-pipe": {"worker_init_fn": seed_pipe, "persistent_workers": True},
}
"""Options that torch refuses, or that mean nothing, without workers."""


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
    maps = ("dicts", "large", "getitems", "fragile", "empty", "drawn")
    cells = [cell(data, "batches", 2) for data in maps]
    cells += [cell(data, "kept", 2) for data in ODD]
    drawn = ("shuffle", "shuffle-generator", "generator", "random-batches")
    cells += [cell("drawn", options, 2) for options in drawn]
    everyday = ("prefetch-1", "persistent", "init-fn", "persistent-init-fn")
    cells += [cell("drawn", "batches", 2, more) for more in everyday]
    cells += [cell("remembering", "batches", 2, m) for m in ("persistent", "persistent-marked")]
    cells += [cell("ints", "sampler", 2, "prefetch-5")]
    cells += [cell("ints", o, 2, "prefetch-1") for o in ("batch-sampler", "single-sampler")]
    cells += [cell("drawn", "shuffle-generator", 2, "persistent")]
    cells += [cell("fragile", "sampler", 3, "prefetch-1")]

    streams = ("one-is-empty", "no-stream", "sized", "drawing")
    cells += [cell(data, "batches", 2) for data in streams]
    cells += [cell(data, "drop-last", 2) for data in ("unequal", "fragile-stream")]
    cells += [cell("one-is-empty", "single", 3, "prefetch-1")]
    cells += [cell("unequal-drawing", "drop-last", 2, "persistent-init-fn")]
    cells += [cell("unequal-drawing", "batches", 3, "persistent")]
    cells += [cell("epochs", "batches", 2, more) for more in ("persistent", "persistent-marked")]

    pipes = ("pipe-shuffled-late", "pipe-drawing", "map-pipe-shuffled")
    cells += [cell(data, "batches", 2) for data in pipes]
    cells += [cell("pipe-shuffled", "shuffle", 2, "persistent")]
    cells += [cell("pipe-shuffled", "single", 3, "persistent-prefetch-1")]
    cells += [cell("pipe-shuffled", "batches", 2, "seeded-pipe")]
    cells += [cell("pipe-drawing", "batches", 2, "persistent-seeded-pipe")]

    cells += [cell(data, "generator", 2, stop=2) for data in ("drawn", "drawing", "pipe-shuffled")]
    # Without what the workers remember or draw: see the last tests of this file.
    return cells + [cell(data, "generator", 2, "persistent", stop=2) for data in ("ints", "epochs")]


def backends(number: int, cell: Cell) -> Iterator[Any]:
    """The backends that a cell is run on; every other one on one that forks, which takes its time."""
    if number % 2 or cell.name in (ON_RAY, "remembering+batches+persistent-marked+2w"):
        yield (None, "fork", "shared-memory")[number // 2 % 3]
    yield "inline"
    if not cell.draws:
        yield Threads(copy_dataset=True) if cell.copies else "threads"
    if cell.name == ON_RAY:
        yield "spawn"


ON_RAY = "drawn+shuffle-generator+persistent+2w"
"""Cell that runs on Ray each time; the rest of the grid is marked `full` there."""

GRID = {cell: tuple(backends(number, cell)) for number, cell in enumerate(cells_with_workers())}
ALONE = cells_without_workers()


def name_of(backend: Any) -> str:
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
        pytest.param(cell, id=cell.name, marks=() if cell.name == ON_RAY else pytest.mark.full)
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
