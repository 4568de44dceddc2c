"""Workers on Ray: the contract suite and the ends of workers, over one cluster for the session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.crew_driver import CrewDriver
from support.platforms import DEADLINE, REPOSITORY
from torch.utils.data import Dataset

from hybridloader import (
    DataLoader,
    Pipeline,
    Ray,
    WorkerDied,
    WorkerTimeout,
)
from hybridloader.errors import BackendUnavailable, WorkerPicklingError
from hybridloader.testing import BackendContract, Gate

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]

SMALL = Ray(num_cpus=0.1)


class TestRay(BackendContract):
    backend = SMALL


def actors() -> list[dict[str, Any]]:
    """Actors of the cluster that are not dead, from the table that its head keeps."""
    from ray._private.state import actors as table

    found: dict[str, dict[str, Any]] = table()
    return [row for row in found.values() if row["State"] != "DEAD"]


def until(condition: Any, seconds: float = 100.0) -> bool:
    """Ray tells its tables of an end some milliseconds later, and gives no event for it."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Images(Dataset[Any]):
    def __init__(self, deadly: Path | None = None, length: int = 40) -> None:
        self.deadly, self.length = deadly, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == 17 and self.deadly is not None and not self.deadly.exists():
            self.deadly.touch()
            os._exit(7)
        return torch.full((100, 1000), index + 0.5), index


class Waiting(Images):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            self.gate.arrive()
        return super().__getitem__(index)


def labels(loader: Any) -> list[int]:
    found = []
    for images, numbers in loader:
        assert torch.equal(images[:, 0, 0], numbers + 0.5)
        images += 1  # raises if it is read-only
        found += numbers.tolist()
    return found


# -- clusters --------------------------------------------------------------------------------------


def test_no_cluster_is_an_error_that_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(BackendUnavailable, match=r"ray\.init\(\).*address=.*start=True"):
        iter(DataLoader(range(4), num_workers=1, backend="ray"))


@pytest.mark.parametrize("way", ["address", pytest.param("start", marks=pytest.mark.full)])
def test_a_program_that_has_no_cluster_connects_to_one_or_starts_one(way: str) -> None:
    script = textwrap.dedent("""
        import sys
        import ray
        from hybridloader import DataLoader, Ray
        way = {"start": True} if sys.argv[1] == "start" else {"address": sys.argv[1]}
        loader = DataLoader(range(8), 4, num_workers=2, backend=Ray(num_cpus=0.1, **way))
        for _ in range(2):
            print([batch.tolist() for batch in loader])
        print(ray.get_runtime_context().gcs_address)
    """)
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", script, address if way == "address" else "start"]
    with tempfile.TemporaryDirectory() as folder:  # it finds no other cluster of this machine
        environment = {**os.environ, "RAY_TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    *batches, used = done.stdout.splitlines()
    assert batches == ["[[0, 1, 2, 3], [4, 5, 6, 7]]"] * 2
    assert (used == address) == (way == "address")


def test_ray_client_is_refused() -> None:
    with pytest.raises(
        BackendUnavailable, match=r"does not run through Ray Client .*ray job submit"
    ):
        Ray(address="ray://head:10001").check()


def test_what_can_not_be_sent_is_named() -> None:
    with pytest.raises(WorkerPicklingError, match="dataset"):
        iter(DataLoader([threading.Lock()], num_workers=1, backend=SMALL))


def test_a_place_that_never_comes_is_a_timeout_with_what_ray_has() -> None:
    loader = DataLoader(range(4), num_workers=1, backend=Ray(num_cpus=1000), timeout=0.5)
    with pytest.raises(WorkerTimeout, match=r"requests num_cpus=1000.*free"):
        next(iter(loader))


@pytest.mark.parametrize(
    "options", [{"num_cpus": -1}, {"resources": {"CPU": 1}}, {"scheduling_strategy": 3}]
)
def test_options_that_ray_does_not_take_are_an_error_before_any_worker(options: Any) -> None:
    before = len(actors())
    with pytest.raises(
        ValueError, match=f"(?s)Ray\\(.*does not take these options: .*{next(iter(options))}"
    ):
        iter(DataLoader(range(4), num_workers=1, backend=Ray(**options)))
    assert len(actors()) == before


# -- deaths ----------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_named_with_actor_and_cause(tmp_path: Path) -> None:
    loader = DataLoader(Images(tmp_path / "died"), 4, num_workers=2, backend=SMALL)
    with pytest.raises(WorkerDied, match=r"Ray actor \w+ on .* is gone: .*unexpectedly"):
        list(loader)


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_worker_that_dies_is_replaced_and_nothing_is_lost(
    tmp_path: Path, persistent: bool
) -> None:
    loader = DataLoader(
        Images(tmp_path / "died"),
        4,
        num_workers=2,
        backend=SMALL,
        on_worker_death="restart",
        persistent_workers=persistent,
    )
    assert labels(loader) == [*range(40)]
    assert labels(loader) == [*range(40)]


@pytest.mark.full  # a node that dies takes an actor along, too
@pytest.mark.parametrize("kill", ["ray.kill", "SIGKILL"])
def test_an_actor_that_is_killed_is_replaced(tmp_path: Path, kill: str) -> None:
    gate = Gate(tmp_path)
    loader = DataLoader(Waiting(gate), 4, num_workers=2, backend=SMALL, on_worker_death="restart")
    iterator: Any = iter(loader)
    first = next(iterator)[1].tolist()
    gate.await_arrivals()
    workers = [*iterator._workers]
    for worker in workers:
        if kill == "ray.kill":
            worker.kill()
        else:
            os.kill(worker.pid, signal.SIGKILL)
    gate.open()
    assert first + labels(iterator) == [*range(40)]
    for worker in workers:
        worker.join(100)
        assert worker.exitcode == 1


def test_a_task_that_takes_too_long_is_told_of_with_the_stack(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    loader = DataLoader(Waiting(gate), 4, num_workers=1, backend=SMALL, task_timeout=3)
    with pytest.raises(WorkerTimeout, match="in arrive"):
        list(loader)
    gate.open()


@pytest.mark.parametrize("policy", [pytest.param("raise", marks=pytest.mark.full), "restart"])
def test_a_cluster_that_is_shut_down_is_an_error_and_none_is_started(policy: str) -> None:
    script = textwrap.dedent("""
        import sys
        import ray
        from hybridloader import DataLoader, Ray
        start = dict(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        ray.init("local", num_cpus=1, **start)
        options = dict(num_workers=1, backend=Ray(num_cpus=0.1), on_worker_death=sys.argv[1])
        batches = iter(DataLoader(range(10_000), 4, **options))
        next(batches)
        ray.shutdown()
        try:
            for batch in batches:
                pass
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        print(ray.is_initialized())
    """)
    command = [sys.executable, "-c", script, policy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "Ray was shut down" in done.stdout, done.stderr
    assert done.stdout.startswith("WorkerDied: ")
    assert done.stdout.endswith("\nFalse\n")


# -- what is left ----------------------------------------------------------------------------------


def test_nothing_is_left_after_an_epoch_or_a_break() -> None:
    assert until(lambda: not actors())
    before = ray.available_resources()["object_store_memory"]
    loader = DataLoader(Images(), 4, num_workers=2, backend=SMALL)
    for _ in loader:
        break
    for images, _ in loader:
        kept = images
    assert until(lambda: not actors()), actors()
    assert until(lambda: ray.available_resources()["object_store_memory"] >= before)
    assert kept.shape == (4, 100, 1000)


def test_a_driver_that_is_killed_leaves_no_actor() -> None:
    script = textwrap.dedent("""
        import os, signal, sys
        import ray
        from hybridloader import DataLoader, Ray
        ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
        loader = DataLoader(range(10_000), 4, num_workers=2, backend=Ray(num_cpus=0.1))
        next(iter(loader))
        print("running", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert until(lambda: not actors())
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", script, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "running\n", done.stderr
    assert until(lambda: not actors(), 30), actors()


def test_a_worker_that_is_told_to_leave_begins_none_of_its_waiting_tasks(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with CrewDriver(SMALL, lambda task: gate.arrive()) as crew:
        for task in range(3):
            crew.send(task)
        gate.await_arrivals()
        crew.raw.leave()
        assert "in arrive" in crew.raw.stack(0)  # it answers calls in order, so it knows by now
        gate.open()
        [worker] = crew.raw.handles
        worker.join(DEADLINE)
        assert worker.exitcode == 0
    assert len([*tmp_path.glob("arrived-*")]) == 1


# -- several stages, other backends ----------------------------------------------------------------


def double(item: Any) -> Any:
    return np.full(50_000, 2 * item)


def shifted(array: Any) -> Any:
    array += 1  # raises if it is read-only
    return array


def test_stages_on_ray_beside_others() -> None:
    pipe = (
        Pipeline.from_iterable(range(200))
        .map(double, backend=SMALL, num_workers=2)
        .map(shifted, backend=SMALL, num_workers=2)
        .map(shifted, backend="threads", num_workers=2)
    )
    with pipe.run() as run:
        assert [int(array[-1]) for array in run] == [2 * item + 2 for item in range(200)]


@pytest.mark.parametrize(
    "places",
    [
        ("fork", SMALL, "fork"),
        pytest.param((SMALL, "threads", SMALL), marks=pytest.mark.full),
    ],
)
def test_a_state_is_the_same_on_ray_as_elsewhere(places: tuple[Any, ...]) -> None:
    def make(backend: Any) -> Any:
        torch.manual_seed(5)
        return DataLoader(Images(), 4, shuffle=True, num_workers=2, backend=backend)

    whole = labels(make("inline"))
    taken, state = [], None
    for turn, backend in enumerate(places):
        loader = make(backend)
        if state is not None:
            loader.load_state_dict(state)
        for count, (_, numbers) in enumerate(loader, 1):
            taken += numbers.tolist()
            if count == 3 and turn < 2:
                state = loader.state_dict()
                break
    assert taken == whole


@pytest.mark.slow
def test_a_node_that_dies_takes_no_result_along() -> None:
    program = (REPOSITORY / "tests") / "support" / "ray_nodes.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    # Ray writes the log of the lost node to the same stream.
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert told["labels"] == [*range(800)]
    assert told["nodes"] == 2
    assert told["actors"] >= 3
