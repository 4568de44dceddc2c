"""Random pipelines, built again and again under other settings, and lists that say what they give."""

from __future__ import annotations

import asyncio
import json
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

import torch
from hypothesis import strategies as st

from hybridloader import Pipeline, Replace, Retry, Skip
from hybridloader.errors import IteratorClosed
from hybridloader.sampling import ShuffleSampler

Event = tuple[str, Any]
"""Item that `next` returned, or error that it raised in the place of one."""

CLOSED = ("closed", "")
SEED = 1
"""Seed of all runs."""


def events(run: Iterator[Any], most: float = math.inf) -> list[Event]:
    found: list[Event] = []
    while len(found) < most:
        try:
            found.append(("item", next(run)))
        except StopIteration:
            break
        except (ArithmeticError, LookupError, ValueError) as error:
            found.append(("error", str(error)))
        except IteratorClosed:  # of a zip that lost count of its rows
            found.append(CLOSED)
            break
    return found


def saved(run: Any) -> Any:
    """Return the state of a run, written as JSON and read again."""
    text = json.dumps(run.state_dict())
    assert len(text) < 10_000
    return json.loads(text)


# -- functions that take whatever the steps before have made -----------------------------------------


async def later(item: Any) -> Any:
    for _ in range(number_of(item) % 3):
        await asyncio.sleep(0)
    return fails_sometimes(item)


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


def kept_or_fails(item: Any) -> bool:
    return kept(fails_sometimes(item))


def several(item: Any) -> Any:
    return [(item, k) for k in range(number_of(item) % 3)]


def several_and_fails(item: Any) -> Iterator[Any]:
    yield from several(item)
    fails_sometimes(item)


def cost(item: Any) -> int:
    return number_of(item) % 5 + 1


def kind(item: Any) -> int:
    return number_of(item) % 3


def size_of(key: int) -> int:
    return key + 1


def tokens(item: Any) -> Any:
    number = number_of(item)
    return list(range(number % 50, number % 50 + number % 9))


def listed(row: Any) -> Any:
    return {name: row[name].tolist() for name in row}


def instead(item: Any, error: Exception) -> Any:
    return ("instead", item)


class Counting:
    """Counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, item: Any) -> Any:
        self.calls += 1
        return item


class FailingSource:
    """Iterable of numbers that raises in the places of some, and goes on."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return map(fails_sometimes, range(self.count))


class Settings:
    """Backends, workers and prefetching, drawn anew for every build: no result may depend on them."""

    def __init__(self, seed: int, *, processes: bool = False) -> None:
        self._random, self._processes = random.Random(seed), processes

    def place(self) -> dict[str, Any]:
        choice = self._random.randrange(4)
        if choice == 0:
            return {}
        if choice == 1:
            return {"backend": "inline"}
        backend = "fork" if self._processes and choice == 2 else "threads"
        return {
            "backend": backend,
            "num_workers": self._random.randint(1, 3),
            "prefetch": self._random.choice([None, 1, 7]),
            "fuse": self._random.random() < 0.7,
            "threads_per_worker": self._random.choice([1, 1, 3]),
        }

    def ahead(self, pipe: Pipeline) -> Pipeline:
        count = self._random.choice([0, 0, 0, 1, 5])
        return pipe.prefetch(count) if count else pipe


# -- what lists say of each step ---------------------------------------------------------------------

Model = Callable[[list[Event], int], Iterable[Event]]
"""Takes what comes before a step, and the epoch."""


def each(function: Callable[[Any], Iterable[Any]], policy: str = "raise") -> Model:
    """A step that makes items of each; `policy` says what comes of one that fails."""

    def model(before: list[Event], epoch: int) -> Iterator[Event]:
        for what, item in before:
            if what != "item":
                yield what, item
                continue
            found: list[Event] = []
            try:
                for result in function(item):
                    found.append(("item", result))
            except ArithmeticError as error:
                if policy == "replace":
                    found = [("item", instead(item, error))]
                elif policy == "raise":
                    found.append(("error", str(error)))
            yield from found

    return model


Grouping = Callable[[list[list[Any]], Any], list[list[Any]]]
"""Adds an item to those that wait, and returns the batches that are given now."""


def grouped(add: Grouping, *, drop_last: bool = False) -> Model:
    def model(before: list[Event], epoch: int) -> Iterator[Event]:
        waiting: list[list[Any]] = []
        for what, item in before:
            if what == "item":
                yield from (("item", batch) for batch in add(waiting, item))
            else:
                yield what, item
        if not drop_last:
            yield from (("item", batch) for batch in waiting)

    return model


def by_key(key: Callable[[Any], int], size: Callable[[int], int]) -> Grouping:
    def add(waiting: list[list[Any]], item: Any) -> list[list[Any]]:
        batch = next((batch for batch in waiting if key(batch[0]) == key(item)), None)
        if batch is None:
            batch = []
            waiting.append(batch)
        batch.append(item)
        if len(batch) < size(key(item)):
            return []
        waiting[:] = [other for other in waiting if other is not batch]
        return [batch]

    return add


def by_number(size: int) -> Grouping:
    return by_key(lambda item: 0, lambda key: size)


def by_cost(limit: int, *, padded: bool = False, most: int | None = None) -> Grouping:
    def add(waiting: list[list[Any]], item: Any) -> list[list[Any]]:
        batch, given = waiting.pop() if waiting else [], []
        costs = [cost(other) for other in [*batch, item]]
        if batch and (max(costs) * len(costs) if padded else sum(costs)) > limit:
            given, batch = [batch], []
        batch = [*batch, item]
        if len(batch) == most:
            return [*given, batch]
        waiting.append(batch)
        return given

    return add


def row(pieces: list[list[int]], length: int) -> Event:
    padding = [0] * (length - sum(map(len, pieces)))
    columns = (
        [token for piece in pieces for token in piece],
        [number for number, piece in enumerate(pieces, 1) for _ in piece],
        [place for piece in pieces for place in range(len(piece))],
    )
    names = ("tokens", "segment_ids", "positions")
    return "item", {name: column + padding for name, column in zip(names, columns, strict=True)}


def split(length: int) -> Model:
    def model(before: list[Event], epoch: int) -> Iterator[Event]:
        pieces: list[list[int]] = []
        for what, item in before:
            if what != "item":
                yield what, item
                continue
            for token in tokens(item):
                if not pieces or token == tokens(item)[0]:
                    pieces.append([])
                pieces[-1].append(token)
                if sum(map(len, pieces)) == length:
                    yield row(pieces, length)
                    pieces = [[]]
            pieces = [piece for piece in pieces if piece]
        if pieces:
            yield row(pieces, length)

    return model


def first_fit(length: int, most: int) -> Model:
    def model(before: list[Event], epoch: int) -> Iterator[Event]:
        rows: list[list[list[int]]] = []
        for what, item in before:
            if what != "item":
                yield what, item
                continue
            document = tokens(item)
            if not document:
                continue
            fits = [found for found in rows if sum(map(len, found)) + len(document) <= length]
            if not fits and len(rows) == most:
                yield from (row(found, length) for found in rows)
                rows = []
            if not fits:
                rows.append([])
            (fits or rows[-1:])[0].append(document)
        yield from (row(found, length) for found in rows)

    return model


def every(first: int, step: int) -> Model:
    """Every `step`-th item from number `first` on."""

    def model(before: list[Event], epoch: int) -> Iterator[Event]:
        for number, event in enumerate(before):
            if (number >= first and (number - first) % step == 0) or event == CLOSED:
                yield event

    return model


def take(count: int) -> Model:
    return lambda before, epoch: before[:count]


def numbered(start: int) -> Model:
    def model(before: list[Event], epoch: int) -> Iterator[Event]:
        for number, (what, item) in enumerate(before, start):
            yield what, (number, item) if what == "item" else item

    return model


def drawn(size: int, seed: int) -> Model:
    def model(before: list[Event], epoch: int) -> Iterator[Event]:
        generator, held = random.Random(f"{seed}/{epoch}"), list[Any]()

        def draw() -> Event:
            place = int(generator.random() * len(held))
            held[place], held[-1] = held[-1], held[place]
            return "item", held.pop()

        for what, item in before:
            if what != "item":
                yield what, item
                continue
            held.append(item)
            if len(held) == size:
                yield draw()
        while held:
            yield draw()

    return model


# -- and of joins ------------------------------------------------------------------------------------


def in_turn(lines: list[list[Event]]) -> list[Event]:
    return [event for turn in zip_longest(*lines) for event in turn if event is not None]


def mixed(
    lines: list[list[Event]], weights: list[int], seed: int, epoch: int, *, first: bool
) -> Iterator[Event]:
    generator = random.Random(f"{seed}/{epoch}")
    alive = [(iter(line), weight) for line, weight in zip(lines, weights, strict=True)]
    while alive:
        ends = list(accumulate(weight for _, weight in alive))
        at = generator.random() * ends[-1]
        number = next(number for number, end in enumerate(ends) if at < end)
        event = next(alive[number][0], None)
        if event is not None:
            yield event
        else:
            del alive[number]
            if first:
                return


def rows(lines: list[list[Event]]) -> Iterator[Event]:
    """Tuples of items by their numbers, until an error ends them."""
    left = [iter(line) for line in lines]
    while True:
        given: list[Event] = []
        for line in left:
            event = next(line, None)
            if event is None:
                return
            if event[0] != "item":
                yield from [event, CLOSED]
                return
            given.append(event)
        yield "item", tuple(item for _, item in given)


# -- pipelines ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A pipeline to build; `make` takes the settings, `model` the epoch.

    `traits` has, in the order of the steps, an ``s`` for one that skips items and a ``c`` for a cache,
    and an ``e`` if the epoch matters.
    """

    name: str
    make: Callable[[Settings], Pipeline]
    model: Callable[[int], list[Event]]
    traits: str = ""

    def __repr__(self) -> str:
        return self.name

    def events(self, epoch: int) -> list[Event]:
        """What a run gives."""
        found = self.model(epoch)
        return found[: found.index(CLOSED) + 1] if CLOSED in found else found


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
        if order == "failing":
            return Pipeline.from_iterable(FailingSource(count))
        return Pipeline.from_dataset(range(count), shuffle=order == "shuffled", **place)

    def model(epoch: int) -> list[Event]:
        numbers: Iterable[int] = range(count)
        if order == "shuffled":
            generator = torch.Generator().manual_seed(SEED + epoch)
            numbers = torch.randperm(count, generator=generator).tolist()
        if order == "sampler":
            numbers = ShuffleSampler(count, seed=3, epoch=epoch)
        found: list[Event] = [("item", number) for number in numbers]
        return (
            list(each(lambda item: [fails_sometimes(item)])(found, 0))
            if order == "failing"
            else found
        )

    return Recipe(f"{order}({count})", make, model, "e" * (order in ("shuffled", "sampler")))


ORDERS = ["in order", "shuffled", "sampler", "iterable", "generator", "failing"]
sources = st.builds(dataset, st.integers(0, 24), st.sampled_from(ORDERS))


POLICIES: dict[str, Any] = {
    "raise": "raise",
    "skip": Skip(None),
    "retry": Retry(1, 0, then=Skip(None)),
    "replace": Replace(instead, None),
}


Build = Callable[[Pipeline, Settings], Pipeline]


def on(kind: str, function: Callable[..., Any], policy: str = "raise", **more: Any) -> Build:
    """A step with a function, in any place; coroutines have one thread."""

    def build(pipe: Pipeline, settings: Settings) -> Pipeline:
        place = settings.place()
        if "concurrency" in more:
            place.pop("threads_per_worker", None)
        return getattr(pipe, kind)(  # type: ignore[no-any-return]
            function, on_error=POLICIES[policy], **more, **place
        )

    return build


def step(kind: str, *args: Any, **more: Any) -> Build:
    return lambda pipe, _: getattr(pipe, kind)(*args, **more)


def batching(kind: str, *args: Any, **more: Any) -> Build:
    return step(kind, *args, collate_fn=list, **more)


def packing(*args: Any) -> Build:
    return lambda pipe, _: pipe.map(tokens).pack(*args).map(listed)


def one(function: Callable[[Any], Any]) -> Callable[[Any], Iterable[Any]]:
    return lambda item: [function(item)]


def chosen(function: Callable[[Any], bool]) -> Callable[[Any], Iterable[Any]]:
    return lambda item: [item] * function(item)


STEPS: dict[str, tuple[Build, Model, str]] = {
    "map": (on("map", changed), each(one(changed)), ""),
    "map, raise": (on("map", fails_sometimes), each(one(fails_sometimes)), ""),
    "map, skip": (on("map", fails_sometimes, "skip"), each(one(fails_sometimes), "skip"), "s"),
    "map, replace": (
        on("map", fails_sometimes, "replace"),
        each(one(fails_sometimes), "replace"),
        "",
    ),
    "coroutines": (on("map", later, concurrency=3), each(one(fails_sometimes)), ""),
    "coroutines, retry": (
        on("map", later, "retry", concurrency=2),
        each(one(fails_sometimes), "skip"),
        "s",
    ),
    "filter": (on("filter", kept), each(chosen(kept)), ""),
    "filter, replace": (
        on("filter", kept_or_fails, "replace"),
        each(chosen(kept_or_fails), "replace"),
        "",
    ),
    "flat_map": (on("flat_map", several), each(several), ""),
    "flat_map, raise": (on("flat_map", several_and_fails), each(several_and_fails), ""),
    "flat_map, skip": (
        on("flat_map", several_and_fails, "skip"),
        each(several_and_fails, "skip"),
        "s",
    ),
    "batch": (batching("batch", 3), grouped(by_number(3)), ""),
    "batch, full": (
        batching("batch", 2, drop_last=True),
        grouped(by_number(2), drop_last=True),
        "",
    ),
    "batch_by": (batching("batch_by", cost, 9), grouped(by_cost(9)), ""),
    "batch_by, padded": (
        batching("batch_by", cost, 12, padded=True),
        grouped(by_cost(12, padded=True)),
        "",
    ),
    "batch_by, at most": (
        batching("batch_by", cost, 9, drop_last=True, max_size=2),
        grouped(by_cost(9, most=2), drop_last=True),
        "",
    ),
    "bucket_by": (batching("bucket_by", kind, 2), grouped(by_key(kind, lambda key: 2)), ""),
    "bucket_by, full": (
        batching("bucket_by", kind, size_of, drop_last=True),
        grouped(by_key(kind, size_of), drop_last=True),
        "",
    ),
    "packed": (packing(5), split(5), ""),
    "packed whole": (packing(8, "first_fit", 2), first_fit(8, 2), ""),
    "shuffle": (step("shuffle", 4, seed=5), drawn(4, 5), "e"),
    "take": (step("take", 7), take(7), ""),
    "skip": (step("skip", 2), every(2, 1), ""),
    "shard": (step("shard", 3, 1), every(1, 3), ""),
    "enumerate": (step("enumerate", 5), numbered(5), ""),
    "cache": (step("cache"), lambda before, epoch: before, "c"),
}


def extended(before: Recipe, step: str) -> Recipe:
    if step == "repeat":
        if (
            "e" in before.traits and "c" in before.traits
        ):  # what it keeps depends on who reads ahead
            return before
        return Recipe(
            f"{before}.repeat",
            lambda settings: settings.ahead(before.make(settings).repeat(2)),
            lambda epoch: [*before.model(2 * epoch), *before.model(2 * epoch + 1)],
            before.traits,
        )
    build, model, traits = STEPS[step]
    return Recipe(
        f"{before}.{step}",
        lambda settings: settings.ahead(build(before.make(settings), settings)),
        lambda epoch: [*model(before.model(epoch), epoch)],
        before.traits + traits,
    )


def combined(how: str, *lines: Recipe) -> Recipe:
    traits = "".join(line.traits for line in lines) + "e" * how.startswith("mix")
    if how == "zip" and any("s" in line.traits for line in lines):
        how = "concat"  # such a zip is refused
    weights = [*range(1, len(lines) + 1)]
    more: dict[str, Any] = {
        "zip": {"strict": False},
        "mix": {"weights": weights, "seed": 4},
        "mix, first": {"weights": weights, "seed": 4, "stop": "first"},
    }

    def built(settings: Settings) -> Pipeline:
        first, *others = [line.make(settings) for line in lines]
        return getattr(first, how.partition(",")[0])(*others, **more.get(how, {}))  # type: ignore[no-any-return]

    def model(epoch: int) -> list[Event]:
        given = [line.model(epoch) for line in lines]
        if how == "zip":
            return [*rows(given)]
        if how == "interleave":
            return in_turn(given)
        if how.startswith("mix"):
            return [*mixed(given, weights, 4, epoch, first=how != "mix")]
        return [event for line in given for event in line]

    return Recipe(f"{how}{lines}", built, model, traits)


JOINS = ["zip", "concat", "mix", "mix, first", "interleave"]


def _wider(inner: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
    steps = st.builds(extended, inner, st.sampled_from([*STEPS, "repeat"]))
    joins = st.builds(combined, st.sampled_from(JOINS), inner, inner)
    return steps | steps | steps | joins


recipes = st.recursive(sources, _wider, max_leaves=5)


def goes_on(recipe: Recipe, stops: list[int], seeds: list[int], epoch: int = 0, **how: Any) -> None:
    """Stop after each of `stops` items in turn, under other settings; the last goes on to the end."""
    expected, found, state = recipe.events(epoch), list[Event](), None
    for number, seed in enumerate(seeds):
        pipe = recipe.make(Settings(seed, **how))
        if "s" not in recipe.traits and all(what == "item" for what, _ in expected):
            assert pipe.length in (None, len(expected))
        begins: Any = {"state": state} if number else {"epoch": epoch, "seed": SEED}
        with pipe.run(**begins) as run:
            found += events(run, stops[number] if number < len(stops) else math.inf)
            assert found == expected[: len(found)]
            if CLOSED in found:
                break
            state = saved(run)
            assert state == saved(run)
            assert state["given"] == len(found)
    assert found == expected
