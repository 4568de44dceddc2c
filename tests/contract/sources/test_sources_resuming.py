"""Resuming sources: at any place, with other workers, backends and ranks, nothing is lost or doubled."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.archives import write_shards

from hybridloader import DataLoader, Pipeline
from hybridloader.sampling import BlockShuffleSampler, DistributedShuffleSampler, ShuffleSampler
from hybridloader.sources import Files, Parquet, Shards, Tar

SOURCES = ["files", "tar", "parquet"]
SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "shuffle": lambda source: ShuffleSampler(source, 3),
    "blocks": lambda source: BlockShuffleSampler(
        source, 3, block_size=3, window_blocks=2, num_canonical_ranks=2
    ),
    "in order": lambda source: BlockShuffleSampler(source, 3, shuffle=False),
}
CREWS = st.sampled_from(
    [*[("inline", 0), ("inline", 2), ("threads", 1), ("threads", 2)] * 3, ("fork", 1), ("fork", 2)]
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shards[Any]]:
    folder = tmp_path_factory.mktemp("data")
    for number in range(22):
        path = folder / "files" / f"class{number % 3}" / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}")
    paths = write_shards(folder / "tar", [5, 9, 0, 8])
    parquet = {}
    if importlib.util.find_spec("pyarrow") is not None:
        import pyarrow.parquet

        for number, count in enumerate((9, 13)):
            rows = pyarrow.table({"x": range(100 * number, 100 * number + count)})
            path = folder / f"{number}.parquet"
            pyarrow.parquet.write_table(rows, path, row_group_size=4)
        parquet["parquet"] = Parquet(f"{folder}/*.parquet")
    return {
        **parquet,
        "files": Files(folder / "files", decode=bytes.decode, class_from_folder=True),
        "tar": Tar(paths, fields=("txt",)),
    }


@pytest.fixture(scope="module", params=SOURCES)
def source(made: dict[str, Shards[Any]], request: Any) -> Shards[Any]:
    if request.param not in made:
        pytest.skip("pyarrow is not installed")
    return made[request.param]


@pytest.fixture(autouse=True)
def _closed(source: Shards[Any]) -> Iterator[None]:
    yield
    source.close()


def loader_of(source: Any, sampler: Any, batch_size: int, crew: tuple[str, int]) -> Any:
    backend, num_workers = crew
    return DataLoader(
        source,
        batch_size,
        sampler=sampler,
        num_workers=num_workers,
        backend=backend,
        collate_fn=list,
    )


@settings(max_examples=30)
@given(
    st.sampled_from([*SAMPLERS]),
    st.integers(1, 6),
    st.integers(0, 30),
    st.lists(CREWS, min_size=2, max_size=2),
)
def test_at_any_place_with_other_workers(
    source: Any, kind: str, size: int, place: int, crews: list[tuple[str, int]]
) -> None:
    """Stop after `place` batches, and go on with other workers, to the end of the next epoch."""
    make = SAMPLERS[kind]
    orders = make(source)
    wanted = [[source[i] for i in order] for order in (list(orders), list(orders))]
    batches = [[samples[i : i + size] for i in range(0, len(samples), size)] for samples in wanted]
    place %= len(batches[0]) + 1
    loader = loader_of(source, make(source), size, crews[0])
    with iter(loader) as iterator:
        assert list(islice(iterator, place)) == batches[0][:place]
        state = json.loads(json.dumps(loader.state_dict()))
    other = loader_of(source, make(source), size, crews[1])
    other.load_state_dict(state)
    assert [*other, *other] == batches[0][place:] + batches[1]


def ranked(kind: str, source: Any, replicas: int, rank: int, uneven: Any) -> Any:
    options: Any = {"num_replicas": replicas, "rank": rank, "uneven": uneven}
    if kind == "blocks":
        return BlockShuffleSampler(
            source, 3, block_size=3, window_blocks=2, num_canonical_ranks=4, **options
        )
    return DistributedShuffleSampler(source, 3, **options)


@settings(max_examples=20)
@given(
    st.sampled_from(["blocks", "shuffle"]),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), CREWS), min_size=2, max_size=4),
    st.sampled_from(["pad", "drop", "exact"]),
)
def test_at_any_place_with_another_number_of_ranks(
    source: Any, kind: str, size: int, legs: Any, uneven: Any
) -> None:
    """Go from leg to leg, each from the state of the one before.

    A leg is a number of ranks, of batches on each, and the workers; the last goes to the end.
    """
    wanted = [source[i] for i in ranked(kind, source, 1, 0, uneven)]
    seen: list[Any] = []
    state: Any = None
    for number, (replicas, batches, crew) in enumerate(legs):
        last = number == len(legs) - 1
        parts, states = [], []
        for rank in range(replicas):
            sampler = ranked(kind, source, replicas, rank, uneven)
            loader = loader_of(source, sampler, size, crew)
            if state is not None:
                loader.load_state_dict(state)
            with iter(loader) as iterator:
                taken = islice(iterator, None if last else batches)
                parts.append([sample for batch in taken for sample in batch])
                states.append(loader.state_dict())
        steps = max(map(len, parts))
        seen += [part[step] for step in range(steps) for part in parts if step < len(part)]
        state = states[0]
        if len(seen) >= len(wanted) - (replicas if uneven == "drop" else 0):
            break  # the epoch is over
    n = min(len(seen), len(wanted))
    assert seen[:n] == wanted[:n]
    assert len(seen) >= len(wanted) - 4 * (uneven == "drop")
    assert len(seen) == len(wanted) or uneven != "exact"


def test_in_a_pipeline(source: Any) -> None:
    def pipe(backend: str) -> Pipeline[Any]:
        sampler = BlockShuffleSampler(source, 3, block_size=3, window_blocks=2)
        read = Pipeline.from_dataset(source, sampler=sampler, backend=backend, num_workers=2)
        return read.batch(4, collate_fn=list)

    whole = list(pipe("threads"))
    for place in range(len(whole)):
        with pipe("fork" if place == 3 else "threads").run() as run:
            assert list(islice(run, place)) == whole[:place]
            state = json.loads(json.dumps(run.state_dict()))
        with pipe("threads").run(state=state) as run:
            assert list(run) == whole[place:]
