"""Workers that die or get stuck, for real: what the error says, and that a new one makes up for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.utils.data
from support.failing_datasets import Samples
from support.platforms import posix

from hybridloader import (
    DataLoader,
    Pipeline,
    RestartPolicy,
    WorkerDied,
    get_worker_info,
)
from hybridloader.errors import TaskTimeout
from hybridloader.testing import Gate

LENGTH = 24

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("backend", ["fork", "shared-memory", None])
def test_a_worker_is_not_forked_in_anothers_place_once_a_device_is_in_use(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of the first workers; without a backend torch's, by which they are forked."""
    if backend == "shared-memory":
        monkeypatch.setattr("multiprocessing.get_start_method", lambda: "fork")
    loader = DataLoader(
        Samples(lambda index: os.getpid(), 40),
        backend=backend,
        num_workers=1,
        on_worker_death="restart",
    )
    with iter(loader) as iterator:  # type: ignore[attr-defined]
        first = int(next(iterator))
        name = "hybridloader.backends.process.backend.device_in_use"
        monkeypatch.setattr(name, lambda: "fake:0")
        psutil.Process(first).kill()
        if backend is None:
            assert {int(batch) for batch in iterator} - {first}
            return
        with pytest.raises(
            WorkerDied, match=r"could not be restarted: .*after fake:0 was initialized"
        ):
            list(iterator)


class Once:
    """True the first time that it is asked about something, whichever process asks."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self, what: Any) -> bool:
        try:
            os.close(os.open(os.path.join(self.folder, str(what)), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Deadly:
    """Samples of which some end the worker, the first time or always."""

    def __init__(self, end: Callable[[], Any], deadly: tuple[int, ...], once: Once | None) -> None:
        self.end, self.deadly, self.once = end, deadly, once

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index in self.deadly and (self.once is None or self.once(index)):
            self.end()
        return index


def killed() -> None:
    psutil.Process().kill()


def left() -> None:
    os._exit(0)


def sys_exit() -> None:
    sys.exit(3)


def stuck() -> None:
    read, write = os.pipe()
    try:
        os.read(read, 1)
    finally:
        os.close(read)
        os.close(write)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def values(loader: Any) -> list[int]:
    return [value for batch in loader for value in batch.tolist()]


# -- restart: map-style ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "end"),
    [
        ("threads", sys_exit),
        ("fork", killed),
        ("fork", left),
        ("spawn", killed),
    ],
)
def test_nothing_is_lost_doubled_or_out_of_order(
    backend: str, end: Callable[[], Any], tmp_path: Path
) -> None:
    data = Deadly(end, (5,) if backend == "spawn" else (0, 5, 17), Once(tmp_path))
    loader = DataLoader(data, 4, num_workers=2, backend=backend, on_worker_death="restart")
    assert values(loader) == list(range(LENGTH))


def test_a_worker_that_dies_between_two_epochs_is_replaced(tmp_path: Path) -> None:
    loader = DataLoader(
        range(LENGTH),  # type: ignore[arg-type]  # it has what a dataset needs
        4,
        num_workers=2,
        backend="fork",
        on_worker_death="restart",
        persistent_workers=True,
    )
    assert values(loader) == list(range(LENGTH))
    it: Any = loader._iterator
    for worker in it._workers:
        psutil.Process(worker.pid).kill()
        worker.join()
    assert values(loader) == list(range(LENGTH))
    it.close()


def test_the_new_worker_has_the_number_and_the_seed_of_the_old_one(tmp_path: Path) -> None:
    once = Once(tmp_path)

    class Who:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[int, int, int]:
            if index == 3 and once(index):
                killed()
            info: Any = get_worker_info()
            return index, info.id, info.seed

    def run(**more: Any) -> list[tuple[int, int, int]]:
        torch.manual_seed(4)
        loader = DataLoader(Who(), None, num_workers=2, backend="fork", **more)
        return [tuple(sample) for sample in loader]

    replaced = run(on_worker_death="restart")
    assert os.listdir(tmp_path) == ["3"]
    assert replaced == run()


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_sample_that_always_kills_is_named_and_the_next_batch_comes(
    batch_size: int | None,
) -> None:
    data = Deadly(killed, (5,), None)
    policy = RestartPolicy(deaths_per_sample=3)
    loader = DataLoader(data, batch_size, num_workers=2, backend="fork", on_worker_death=policy)
    with iter(loader) as it:
        numbers = values if batch_size else list
        assert numbers(islice(it, 1 if batch_size else 5)) == list(range(4 if batch_size else 5))
        with pytest.raises(WorkerDied, match=r"3 workers died at this sample.*SIGKILL"):
            next(it)
        assert numbers(it) == list(range(8 if batch_size else 6, LENGTH))


def test_a_sample_that_always_kills_is_skipped_where_bad_samples_are() -> None:
    data = Deadly(killed, (5, 6, 17), None)
    loader = DataLoader(
        data, 4, num_workers=2, backend="fork", on_worker_death="restart", on_error="skip"
    )
    assert sorted(values(loader)) == [i for i in range(LENGTH) if i not in data.deadly]
    assert [record.index for record in loader.skipped] == [5, 6, 17]
    assert all(isinstance(record.error, WorkerDied) for record in loader.skipped)


def test_an_item_that_always_kills_is_given_up_also_where_items_are_numbered() -> None:
    pipe = Pipeline.from_dataset(range(LENGTH)).map(
        Deadly(killed, (5,), None).__getitem__,
        backend="fork",
        num_workers=2,
        seeding="sample",
        on_worker_death="restart",
        on_error="skip",
    )
    with pipe.run() as run:
        assert list(run) == [i for i in range(LENGTH) if i != 5]
        assert [record.index for record in run.skipped] == [5]


# -- restart: iterable-style and pipelines -------------------------------------------------------------


class Shards(torch.utils.data.IterableDataset[int]):
    def __init__(self, once: Once) -> None:
        self.once = once

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        for number in range(LENGTH // 2):
            if number in (0, 7) and self.once(f"{info.id}-{number}"):
                killed()
            yield 100 * info.id + number


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_shard_is_read_on_behind_what_was_delivered(
    batch_size: int | None, persistent: bool, tmp_path: Path
) -> None:
    def run(folder: Path, **more: Any) -> list[list[Any]]:
        loader = DataLoader(
            Shards(Once(folder)),
            batch_size,
            num_workers=2,
            backend="fork",
            persistent_workers=persistent,
            collate_fn=list if batch_size else None,
            **more,
        )
        return [list(loader) for _ in range(2)]

    replaced = run(tmp_path, on_worker_death="restart")
    assert len(os.listdir(tmp_path)) == 4
    assert replaced == run(tmp_path)


@pytest.mark.parametrize("seeding", ["worker", "sample"])
def test_a_reader_of_a_pipeline_reads_on_behind_what_was_delivered(
    seeding: str, tmp_path: Path
) -> None:
    pipe = Pipeline.from_iterable(
        Shards(Once(tmp_path)),
        backend="fork",
        num_workers=2,
        seeding=seeding,
        on_worker_death="restart",
    )
    with pipe.run() as run:
        assert list(run) == [reader + n for n in range(LENGTH // 2) for reader in (0, 100)]
    assert len(os.listdir(tmp_path)) == 4


def test_stages_replace_their_workers_and_what_went_from_one_to_the_next_is_sent_again(
    tmp_path: Path,
) -> None:
    """Large results, which lie in slots of the first stage's workers while the second's work on them."""
    once = Once(tmp_path)

    def grow(index: int) -> torch.Tensor:
        if index in (3, 11) and once(f"grow {index}"):
            killed()
        return torch.full((1 << 18,), index)

    def shrink(tensor: torch.Tensor) -> tuple[int, int]:
        index = int(tensor[0])
        if index in (4, 11, 12) and once(f"shrink {index}"):
            killed()
        return index, int(tensor.sum())

    where: dict[str, Any] = {"backend": "fork", "num_workers": 2, "on_worker_death": "restart"}
    pipe = Pipeline.from_iterable(range(LENGTH)).map(grow, **where).map(shrink, fuse=False, **where)
    with pipe.run() as run:
        assert list(run) == [(index, index << 18) for index in range(LENGTH)]
        assert len(os.listdir(tmp_path)) == 5
        assert "restarts" in run.report()


# -- tasks that run over -------------------------------------------------------------------------------

LIMIT = 3
"""Seconds that a task may take: those of a good one, in a process that begins, on a busy machine."""


@posix
def test_a_stuck_process_is_replaced(tmp_path: Path) -> None:
    data = Deadly(stopped, (5,), Once(tmp_path))
    loader = DataLoader(
        data, 4, num_workers=2, backend="fork", on_worker_death="restart", task_timeout=LIMIT
    )
    assert values(loader) == list(range(LENGTH))


def test_a_stuck_process_is_told_with_its_stack_and_ended() -> None:
    loader = DataLoader(
        Deadly(stuck, (5,), None), 4, num_workers=2, backend="fork", task_timeout=LIMIT
    )
    with iter(loader) as it:
        workers = list(it._workers)
        with pytest.raises(TaskTimeout) as caught:
            list(it)
    told = str(caught.value)
    assert f"task_timeout={LIMIT}" in told
    assert "[4, 5, 6, 7]" in told
    assert "in stuck" in told
    assert "on_worker_death='restart'" in told
    assert not any(worker.is_alive() for worker in workers)


def test_a_stuck_thread_is_told_with_its_stack_and_can_not_be_killed(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    loader = DataLoader(
        Deadly(gate.arrive, (5,), None),
        4,
        num_workers=2,
        backend="threads",
        task_timeout=1,
        on_worker_death="restart",
    )
    it = iter(loader)
    try:
        with pytest.raises(TaskTimeout, match=r"(?s)can't be killed.*in arrive"):
            list(it)
    finally:
        gate.open()


# -- the report ----------------------------------------------------------------------------------------


def test_the_loader_reports_its_workers_from_another_thread_while_it_waits(tmp_path: Path) -> None:
    gate, begun = Gate(tmp_path), threading.Event()
    loader = DataLoader(Deadly(gate.arrive, (4,), None), 4, num_workers=1, backend="threads")
    assert loader.report() == ""
    found: list[int] = []

    def use() -> None:
        for batch in loader:
            found.extend(batch.tolist())
            begun.set()  # so it has heard that the worker is ready

    thread = threading.Thread(target=use)
    thread.start()
    begun.wait()
    gate.await_arrivals()
    told = loader.report()
    gate.open()
    thread.join()
    assert "busy" in told
    assert "[4, 5, 6, 7]" in told
    assert str(os.getpid()) in told
    assert found == list(range(LENGTH))
    assert loader.report() == ""  # its iterator is no more
