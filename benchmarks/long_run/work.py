"""The mixed work of the long run: loaders of many kinds, and the account of what they delivered.

Each kind draws its sizes from its own random generator, so a cycle of work is the same for one seed,
and raises `WrongSamples` unless every sample came exactly once or is listed as skipped.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.datasets import Ints, spin
from benchmarks.machine import ROOT

LOOPS = 100
"""Turns of the loop in a plain sample: some 10 us."""


class Plain(Ints):
    """Samples that are their own index, and some work."""

    def __getitem__(self, index: int) -> Any:
        spin(LOOPS)
        return index


class Large(Plain):
    """Arrays of `size` numbers that are all the sample's index."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__(length)
        self.size = size

    def __getitem__(self, index: int) -> Any:
        import numpy

        return numpy.full(self.size, index, dtype=numpy.int32)


class Failing(Plain):
    """Every `nth` sample fails, `times` times in each process."""

    def __init__(self, length: int, nth: int, times: int = 1 << 30) -> None:
        super().__init__(length)
        self.nth, self.times = nth, times
        self.failed: dict[int, int] = {}

    def fails(self) -> set[int]:
        """Indices of the samples that fail."""
        return set(range(0, self.length, self.nth))

    def __getitem__(self, index: int) -> int:
        count = self.failed.get(index, 0)
        if index % self.nth == 0 and count < self.times:
            self.failed[index] = count + 1
            raise OSError(f"sample {index} is one of those that fail")
        return index


def shards(length: int) -> Any:
    """An iterable dataset of which each of n workers reads every n-th index."""
    from torch.utils.data import IterableDataset

    from hybridloader import get_worker_info

    class Shards(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            first, step = (0, 1) if info is None else (info.id, info.num_workers)
            yield from range(first, length, step)

    return Shards()


def double(item: int) -> int:
    """The first stage of the pipeline."""
    return 2 * item


def one_more(item: int) -> int:
    """Its second stage."""
    spin(LOOPS)
    return item + 1


class WrongSamples(Exception):
    """A sample is missing, came twice, or is not what it should be."""


@dataclass
class Job:
    """One kind of work in one cycle.

    Attributes
    ----------
    chance
        Source of all sizes.
    tally
        What was done so far, by name.
    """

    backend: Any
    chance: random.Random
    tally: Counter[str] = field(default_factory=Counter)

    def loader(self, dataset: Any, **more: Any) -> Any:
        """A `DataLoader` on this backend with one to three workers."""
        from hybridloader import DataLoader

        options: dict[str, Any] = {"batch_size": self.chance.choice((1, 4, 16)), "timeout": 60.0}
        options |= {"backend": self.backend, "num_workers": self.chance.randint(1, 3)} | more
        if self.backend == "inline":
            options |= {"num_workers": 0, "persistent_workers": False, "timeout": 0}
        return DataLoader(dataset, **options)

    def take(self, batches: Iterable[Any], most: int = 1 << 60) -> list[int]:
        """Indices in the next `most` batches, which are counted."""
        found: list[int] = []
        for number, batch in enumerate(batches, 1):
            found += [int(index) for index in batch]
            if number == most:
                break
        self.tally["batches"] += number if found else 0
        self.tally["samples"] += len(found)
        return found

    def expect(self, found: Iterable[int], wanted: Iterable[int]) -> None:
        """Raise `WrongSamples` unless `found` has each of `wanted` once, and nothing else."""
        found, wanted = Counter(found), Counter(wanted)
        if found != wanted:
            lost, doubled = sorted(wanted - found), sorted(found - wanted)
            raise WrongSamples(f"lost {lost[:20]}, too many {doubled[:20]}")


def small_batches(job: Job) -> None:
    """A shuffled epoch of integers."""
    import torch

    length = job.chance.randint(1, 400)
    order = torch.Generator().manual_seed(job.chance.getrandbits(32))
    with iter(job.loader(Plain(length), shuffle=True, generator=order)) as batches:
        job.expect(job.take(batches), range(length))


def large_batches(job: Job) -> None:
    """Batches of up to 2 MB, two of which are kept while others come."""
    length, size = job.chance.randint(8, 48), job.chance.choice((4_000, 20_000, 130_000))
    found, kept = [], []
    loader = job.loader(Large(length, size), batch_size=job.chance.choice((1, 2, 4)))
    with iter(loader) as batches:
        for batch in batches:
            kept.append(batch)
            if len(kept) == 3:
                found += _indices_of(kept.pop(0))
        for batch in kept:
            found += _indices_of(batch)
    job.tally["batches"] += len(loader)
    job.tally["samples"] += length
    job.expect(found, range(length))


def _indices_of(batch: Any) -> list[int]:
    first = batch[:, 0]
    if not bool((batch == first[:, None]).all()):
        raise WrongSamples(f"a batch of samples {first.tolist()} has numbers of others")
    return [int(index) for index in first]


def iterable(job: Job) -> None:
    """An epoch of an iterable dataset."""
    length = job.chance.randint(1, 300)
    with iter(job.loader(shards(length))) as batches:
        job.expect(job.take(batches), range(length))


def skipping(job: Job) -> None:
    """Samples that fail are left out and listed."""
    from hybridloader import Skip

    dataset = Failing(job.chance.randint(20, 200), job.chance.choice((2, 7, 30)))
    with iter(job.loader(dataset, on_error=Skip(max_failures=None))) as batches:
        found = job.take(batches)
        skipped = [record.index for record in batches.skipped]
    job.tally["skipped"] += len(skipped)
    job.expect(skipped, dataset.fails())
    job.expect([*found, *skipped], range(len(dataset)))


def retrying(job: Job) -> None:
    """Samples that fail twice are there at the third attempt."""
    from hybridloader import Retry

    dataset = Failing(job.chance.randint(20, 100), job.chance.choice((7, 30)), times=2)
    policy = Retry(2, backoff=0.001, retry_on=OSError)
    with iter(job.loader(dataset, on_error=policy)) as batches:
        job.expect(job.take(batches), range(len(dataset)))
    job.tally["retried"] += len(dataset.fails())


def broken_off(job: Job) -> None:
    """Epochs that end in the middle, with workers kept; then a whole one; then the loader is dropped."""
    length = job.chance.randint(40, 200)
    loader = job.loader(Plain(length), batch_size=4, persistent_workers=True)
    for _ in range(job.chance.randint(1, 3)):
        job.take(loader, most=job.chance.randint(1, 8))
        job.tally["broken off"] += 1
    job.expect(job.take(loader), range(length))
    job.take(loader, most=2)


def resumed(job: Job) -> None:
    """A state is taken in the middle, and another loader goes on from there."""
    length = job.chance.randint(40, 200)
    options = {"batch_size": 4, "shuffle": True, "num_workers": job.chance.randint(1, 3)}
    first = job.loader(Plain(length), **options)
    with iter(first) as batches:
        found = job.take(batches, most=job.chance.randint(1, 9))
        state = first.state_dict()
    second = job.loader(Plain(length), **options)
    second.load_state_dict(state)
    with iter(second) as batches:
        job.expect([*found, *job.take(batches)], range(length))
    job.tally["resumed"] += 1


def pipeline(job: Job) -> None:
    """Two stages: a pass that is broken off, its rest from a state, and a whole one."""
    from hybridloader import Pipeline

    length = job.chance.randint(20, 200)
    pipe = Pipeline.from_iterable(range(length))
    for function in (double, one_more):
        where: dict[str, Any] = {}
        if job.backend != "inline":
            where = {"backend": job.backend, "num_workers": job.chance.randint(1, 2)}
            where |= {"fuse": False, "timeout": 60.0}
        pipe = pipe.map(function, **where)
    pipe = pipe.batch(4)
    wanted = [2 * index + 1 for index in range(length)]
    with pipe.run() as run:
        found = job.take(run, most=job.chance.randint(1, 4))
        state = run.state_dict()
    with pipe.run(state=state) as run:
        job.expect([*found, *job.take(run)], wanted)
    with pipe.run() as run:
        job.expect(job.take(run), wanted)
    job.tally["broken off"] += 1
    job.tally["resumed"] += 1


def storm(job: Job) -> None:
    """Workers that die, are killed, hang and fail while they are replaced: as in the tests."""
    folder = str(ROOT / "tests" / "storms")
    if folder not in sys.path:
        sys.path.append(folder)
    from storm import Weather, ride_out

    weather = Weather(
        seed=job.chance.getrandbits(32),
        backend=job.backend,
        form=job.chance.choice(("loader", "iterable", "pipeline")),
        workers=job.chance.randint(1, 3),
        length=job.chance.choice((17, 60)),
        batch_size=job.chance.choice((1, 4)),
    )
    account = ride_out(weather)
    job.tally["faults"] += sum(account.faults.values())
    job.tally["workers replaced"] += account.restarts
    job.tally["samples"] += len(account.delivered)
    job.tally["skipped"] += len(account.skipped)


KINDS: tuple[Callable[[Job], None], ...] = (
    *(small_batches, large_batches, iterable, skipping, retrying),
    *(broken_off, resumed, pipeline, storm),
)


def cycle(backend: str, seed: int, number: int, tally: Counter[str]) -> None:
    """All kinds of work once, in an order that is drawn.

    Raises
    ------
    WrongSamples
        Samples were lost, doubled or changed; the message says by which kind of work.
    """
    kinds = random.Random(f"{seed}/{backend}/{number}").sample(KINDS, len(KINDS))
    for kind in kinds:
        chance = random.Random(f"{seed}/{backend}/{number}/{kind.__name__}")
        try:
            kind(Job(backend, chance, tally))
        except Exception as error:
            where = f"{kind.__name__} on {backend}, seed {seed}, cycle {number}"
            raise WrongSamples(f"{where}: {type(error).__name__}: {error}") from error
    tally["cycles"] += 1
    gc.collect()
