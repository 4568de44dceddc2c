"""Datasets, samplers and options of which the parity tests make their cells."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
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
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

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
    "subset-random": lambda log: {"batch_size": 3, "sampler": SubsetRandomSampler([1, 4, 6, 8, 9])},
    "weighted": lambda log: {"batch_size": 3, "sampler": WeightedRandomSampler([1.0, 2, 3], 7)},
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
