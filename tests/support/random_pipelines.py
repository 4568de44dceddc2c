"""Random pipelines, built again and again under other settings, and their items."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from hybridloader import Pipeline
from hybridloader.errors import IteratorClosed
from hybridloader.sampling import ShuffleSampler

Event = tuple[str, Any]
"""Item that `next` returned, or error that it raised in the place of one."""


def events(run: Iterator[Any], most: float = math.inf) -> list[Event]:
    found: list[Event] = []
    while len(found) < most:
        try:
            found.append(("item", next(run)))
        except StopIteration:
            break
        except (ArithmeticError, LookupError) as error:
            found.append(("error", str(error)))
        except IteratorClosed:  # of a zip that lost count of its rows
            found.append(("closed", ""))
            break
    return found


def saved(run: Any) -> Any:
    """Return the state of a run, written as JSON and read again."""
    text = json.dumps(run.state_dict())
    assert len(text) < 10_000
    return json.loads(text)


def number_of(item: Any) -> int:
    return zlib.crc32(repr(item).encode())


def changed(item: Any) -> Any:
    return (item, "changed")


def fails_sometimes(item: Any) -> Any:
    if number_of(item) % 7 == 0:
        raise ArithmeticError(repr(item))
    return item


def kept(item: Any) -> bool:
    return number_of(item) % 3 != 0


def several(item: Any) -> Any:
    return [(item, k) for k in range(number_of(item) % 3)]


def cost(item: Any) -> int:
    return number_of(item) % 5 + 1


def tokens(item: Any) -> Any:
    number = number_of(item)
    return list(range(number % 50, number % 50 + number % 9))


def listed(row: Any) -> Any:
    return {name: row[name].tolist() for name in row}


def kind(item: Any) -> int:
    return number_of(item) % 3


def parts(item: Any) -> Any:
    return item if isinstance(item, list) else [item]


class Counting:
    """Counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, item: Any) -> Any:
        self.calls += 1
        return item


class Settings:
    """Backends, workers and prefetching, drawn anew for every build: no result may depend on them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def place(self) -> dict[str, Any]:
        choice = self._random.randrange(4)
        if choice == 0:
            return {}
        if choice == 1:
            return {"backend": "inline"}
        workers, ahead = self._random.randint(1, 3), self._random.choice([None, 1, 7])
        fuse = self._random.random() < 0.7
        return {"backend": "threads", "num_workers": workers, "prefetch": ahead, "fuse": fuse}

    def ahead(self, pipe: Pipeline) -> Pipeline:
        count = self._random.choice([0, 0, 0, 1, 5])
        return pipe.prefetch(count) if count else pipe


@dataclass(frozen=True)
class Recipe:
    """A pipeline to build; `make` takes the settings."""

    told: str
    make: Callable[[Settings], Pipeline]

    def __repr__(self) -> str:
        return self.told


def dataset(count: int, order: str) -> Recipe:
    def make(settings: Settings) -> Pipeline:
        place = settings.place()
        if order == "sampler":
            sampler = ShuffleSampler(count, seed=3)
            return Pipeline.from_dataset(range(count), sampler=sampler, **place)
        if order == "iterable":
            return Pipeline.from_iterable(list(range(count)))
        if order == "generator":
            return Pipeline.from_iterable(lambda: iter(range(count)))
        if order == "shuffled":
            return Pipeline.from_dataset(range(count), shuffle=True, **place)
        return Pipeline.from_dataset(range(count), **place)

    return Recipe(f"{order}({count})", make)


sources = st.builds(
    dataset,
    st.integers(0, 24),
    st.sampled_from(["in order", "shuffled", "sampler", "iterable", "generator"]),
)

_STEPS: dict[str, Callable[[Pipeline, Settings], Pipeline]] = {
    "map": lambda pipe, settings: pipe.map(changed, **settings.place()),
    "filter": lambda pipe, settings: pipe.filter(kept, **settings.place()),
    "flat_map": lambda pipe, settings: pipe.flat_map(several, **settings.place()),
    "failing": lambda pipe, settings: pipe.map(fails_sometimes, **settings.place()),
    "batch": lambda pipe, _: pipe.batch(3, collate_fn=list),
    "full batch": lambda pipe, _: pipe.batch(2, drop_last=True, collate_fn=list),
    "batch_by": lambda pipe, _: pipe.batch_by(cost, 9, collate_fn=list),
    "bucket_by": lambda pipe, _: pipe.bucket_by(kind, 2, collate_fn=list),
    "unbatch": lambda pipe, _: pipe.unbatch(split=parts),
    "packed": lambda pipe, _: pipe.map(tokens).pack(5).map(listed),
    "packed whole": lambda pipe, _: (
        pipe.map(tokens).pack(6, "first_fit", 2, "truncate").map(listed)
    ),
    "shuffle": lambda pipe, _: pipe.shuffle(4),
    "take": lambda pipe, _: pipe.take(7),
    "skip": lambda pipe, _: pipe.skip(2),
    "enumerate": lambda pipe, _: pipe.enumerate(5),
    "repeat": lambda pipe, _: pipe.repeat(2),
    "cache": lambda pipe, _: pipe.cache(),
    "shard": lambda pipe, _: pipe.shard(3, 1),
    "forked": lambda pipe, settings: _joined(pipe, settings, 0),
    "forked unevenly": lambda pipe, settings: _joined(pipe, settings, 1),
    "forked in a row": lambda pipe, settings: _in_a_row(pipe, settings),
    "forked and filtered": lambda pipe, settings: _filtered(pipe, settings),
}

STEPS = sorted(_STEPS)


def _joined(pipe: Pipeline, settings: Settings, skipped: int) -> Pipeline:
    one, other = pipe.tee()
    one = one.map(changed, **settings.place())
    return Pipeline.zip(one, settings.ahead(other).skip(skipped), strict=False)


def _in_a_row(pipe: Pipeline, settings: Settings) -> Pipeline:
    one, other = pipe.tee()
    return one.map(changed, **settings.place()).concat(settings.ahead(other))


def _filtered(pipe: Pipeline, settings: Settings) -> Pipeline:
    one, other = pipe.tee()
    return one.filter(kept, **settings.place()).interleave(other)


def _extended(before: Recipe, step: str) -> Recipe:
    def make(settings: Settings) -> Pipeline:
        return settings.ahead(_STEPS[step](before.make(settings), settings))

    return Recipe(f"{before}.{step}", make)


def _combined(how: str, *lines: Recipe) -> Recipe:
    def make(settings: Settings) -> Pipeline:
        first, *others = [line.make(settings) for line in lines]
        if how == "zip":
            return first.zip(*others, strict=False)
        if how == "concat":
            return first.concat(*others)
        if how == "mix":
            return first.mix(*others, weights=range(1, len(lines) + 1))
        return first.interleave(*others, block_length=2)

    return Recipe(f"{how}{lines}", make)


def _wider(inner: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
    steps = st.builds(_extended, inner, st.sampled_from(STEPS))
    hows = st.sampled_from(["zip", "concat", "mix", "interleave"])
    return steps | steps | steps | st.builds(_combined, hows, inner, inner)


recipes = st.recursive(sources, _wider, max_leaves=5)
