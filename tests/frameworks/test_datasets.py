"""HF datasets: batches by `__getitems__`, and streams in shards whose epoch is in shared memory."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeded_training import LIKE_TORCHS_PROCESSES, WORKERS, Regression, torch_loader

from hybridloader import DataLoader, Threads

datasets = pytest.importorskip("datasets")
from datasets import Dataset, IterableDataset  # noqa: E402
from datasets.distributed import split_dataset_by_node  # noqa: E402

BACKENDS: list[Any] = [*LIKE_TORCHS_PROCESSES, "threads", Threads(copy_dataset=True)]
EPOCHS = 2
SHARDS, IN_SHARD = 3, 5


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Nothing is written to a cache, and what is not an error is not said."""
    datasets.disable_caching()
    datasets.disable_progress_bars()
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    yield
    datasets.logging.set_verbosity(level)
    datasets.enable_progress_bars()
    datasets.enable_caching()


def table() -> Any:
    rows = {
        "features": [[1.0, k / 20, k / 7] for k in range(20)],
        "target": [k / 20 for k in range(20)],
    }
    return Dataset.from_dict(rows).with_format("torch")


def read(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for k in range(IN_SHARD):
            yield {"features": [1.0, shard / 3, k / 5], "target": (shard + k) / 8}


def stream(shards: int = SHARDS) -> Any:
    made = IterableDataset.from_generator(read, gen_kwargs={"shards": [*range(shards)]})
    return made.shuffle(seed=1, buffer_size=6).with_format("torch")


def trained(loader: Any, dataset: Any, *, epochs: bool = False) -> list[float]:
    """The losses of all steps; `epochs` says the epoch to the dataset, as Trainer and accelerate do."""
    torch.manual_seed(2)
    regression = Regression()
    seen = []
    for epoch in range(EPOCHS):
        if epochs:
            dataset.set_epoch(epoch)
        seen += [regression.step((batch["features"], batch["target"])) for batch in loader]
    loader._iterator = None
    return seen


@functools.cache
def torchs_on_a_table(workers: int) -> list[float]:
    data = table()
    return trained(torch_loader(data, batch_size=4, shuffle=True, num_workers=workers), data)


@functools.cache
def torchs_on_a_stream(workers: int) -> list[float]:
    """The order depends on the epoch alone, with persistent workers or without."""
    data = stream()
    found = []
    for stays in (False, True):
        loader = torch_loader(data, batch_size=4, num_workers=workers, persistent_workers=stays)
        found.append(trained(loader, data, epochs=True))
    assert found[0] == found[1]
    return found[0]


WITH_WORKERS = [(WORKERS, backend) for backend in BACKENDS]


def test_r33_losses_of_a_table_are_those_of_torchs_loader() -> None:
    data = table()
    for workers, backend in [(0, None), (0, "inline"), *WITH_WORKERS]:
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, backend=backend)
        assert trained(loader, data) == torchs_on_a_table(workers)
    assert len(set(torchs_on_a_table(WORKERS))) == 5 * EPOCHS


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_r33_a_table_is_asked_for_whole_batches(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def columns(data: Any, key: Any) -> Any:
        assert not isinstance(key, int), f"asked for sample {key} alone"
        return own(data, key)

    own = Dataset.__getitem__
    monkeypatch.setattr(Dataset, "__getitem__", columns)
    loader = DataLoader(table(), batch_size=4, num_workers=1, backend=backend)
    assert [len(batch["target"]) for batch in loader] == [4] * 5


@pytest.mark.filterwarnings("ignore:stage 'DataLoader'. the dataset has 3 shards")
@pytest.mark.parametrize("persistent", [False, True])
def test_r29_r30_losses_of_a_stream_are_those_of_torchs_loader(persistent: bool) -> None:
    """Each epoch is shuffled otherwise, which workers that stay can only know by shared memory."""
    for workers, backend in [*WITH_WORKERS, (SHARDS + 2, "threads"), (SHARDS + 1, "fork")]:
        data = stream()
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
        loader = DataLoader(data, batch_size=4, backend=backend, **options)
        wanted = torchs_on_a_stream(workers)
        assert trained(loader, data, epochs=True) == wanted, (workers, backend)
        assert len(set(wanted)) == len(wanted)


@pytest.mark.slow  # the worker imports datasets
def test_r30_fresh_processes_that_stay_see_the_epoch() -> None:
    data = stream()
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True, backend="spawn")
    assert trained(loader, data, epochs=True) == torchs_on_a_stream(1)


def test_streams_split_by_node_are_those_of_torchs_loader() -> None:
    for backend in BACKENDS:
        seen: list[Any] = []
        for rank in range(2):
            data = split_dataset_by_node(stream(4), rank=rank, world_size=2)
            options = {"batch_size": 4, "num_workers": 2}
            wanted = [batch["features"].tolist() for batch in torch_loader(data, **options)]
            got = [b["features"].tolist() for b in DataLoader(data, backend=backend, **options)]
            assert got == wanted
            seen += [tuple(features) for batch in got for features in batch]
        assert len(set(seen)) == len(seen) == 4 * IN_SHARD


def test_more_workers_than_shards_is_said(caplog: pytest.LogCaptureFixture) -> None:
    datasets.logging.set_verbosity_warning()
    datasets.logging.enable_propagation()
    try:
        loader = DataLoader(stream(), batch_size=4, num_workers=SHARDS + 1, backend="threads")
        assert sum(len(batch["target"]) for batch in loader) == SHARDS * IN_SHARD
    finally:
        datasets.logging.disable_propagation()
    assert "Too many dataloader workers: 4 (max is dataset.num_shards=3)" in caplog.text


@pytest.mark.parametrize("backend", ["threads", "fork"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_from_a_state(workers: int, backend: str) -> None:
    """Its own `state_dict` and `load_state_dict` are used, as by torchdata; later epochs are whole."""
    if workers == 0:
        backend = "inline"

    def loader() -> DataLoader:
        data = IterableDataset.from_generator(read, gen_kwargs={"shards": [*range(SHARDS)]})
        formatted = data.with_format("torch")
        next(iter(formatted))  # so its state is not that of a beginning
        stay = {"persistent_workers": True} if workers else {}
        return DataLoader(formatted, batch_size=2, num_workers=workers, backend=backend, **stay)

    def features(batches: Any) -> list[Any]:
        return [batch["features"].tolist() for batch in batches]

    first, other, last = loader(), loader(), loader()
    whole = features(first)
    iterator = iter(first)
    taken = features(itertools.islice(iterator, 3))
    other.load_state_dict(first.state_dict())
    assert taken + features(other) == whole
    assert [features(other) for _ in range(2)] == [whole, whole]
    last.load_state_dict(other.state_dict())
    assert [features(last) for _ in range(2)] == [whole, whole]
    for one in (first, other, last):
        if one._iterator is not None:
            one._iterator.close()


@pytest.mark.filterwarnings("ignore:IterableDataset has no state_dict:UserWarning")
@pytest.mark.parametrize(("workers", "backend"), [(0, None), (2, "fork")])
def test_a_shuffled_stream_goes_on_exactly_at_any_place(workers: int, backend: Any) -> None:
    """datasets' own state leaves out the samples in the shuffle's buffer."""

    def loader() -> DataLoader:
        return DataLoader(stream(), batch_size=2, num_workers=workers, backend=backend)

    whole = [batch["features"].tolist() for batch in loader()]
    for place in range(len(whole)):
        first, other = loader(), loader()
        with iter(first) as iterator:  # type: ignore[attr-defined]
            for _ in range(place):
                next(iterator)
            other.load_state_dict(first.state_dict())
        assert [batch["features"].tolist() for batch in other] == whole[place:]


def test_the_page_resumes_a_stream_with_other_workers() -> None:
    page = Path(__file__).parents[2] / "docs" / "frameworks" / "datasets.md"
    section = page.read_text().partition("\n## Other workers and ranks\n")[2]
    block = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(block[1].replace('"fork"', '"threads"'), names)
    names.clear()  # the iterator is let go
