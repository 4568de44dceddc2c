"""Limits of memory for batches: the user's options, the memory of a process, and the effects."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.failing_datasets import kinds, outcomes
from support.platforms import posix
from torch.utils.data import Dataset

from hybridloader import DataLoader, Fork, Inline, Memory, Spawn, Threads
from hybridloader._support import system
from hybridloader.memory import limits
from hybridloader.memory.limits import SHARE, process_limit, ranks_here

V1_NO_LIMIT = 9_223_372_036_854_771_712
"""Limit of cgroup v1 when there is none: the largest multiple of a page."""

# -- what a user may say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "kind", "words"),
    [
        *((limit, ValueError, "leaves no memory") for limit in (0, -0.5, float("nan"))),
        *((limit, ValueError, "as an int") for limit in (1.0001, float("inf"))),
        *((limit, TypeError, "limit is bytes") for limit in (True, "1GB")),
    ],
)
def test_a_limit_that_is_none_is_refused_and_named(
    limit: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        Memory(limit=limit)


def test_bytes_of_each_kind_of_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "process_limit", lambda: 1000)
    assert Memory(limit=1).bytes() == 1
    assert Memory(limit=5_000_000).bytes() == 5_000_000  # what the user says, however much
    assert Memory(limit=1.0).bytes() == 1000
    assert Memory(limit=0.25).bytes() == 250
    assert Memory(limit=1e-9).bytes() == 1  # never nothing
    assert Memory().bytes() == 1000 * SHARE
    assert repr(Memory()) == "Memory(limit=None)"


def test_the_ranks_of_a_machine_divide_shares_and_not_what_a_user_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "process_limit", lambda: 80_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Memory().bytes() == 10_000 * SHARE
    assert Memory(limit=0.1).bytes() == 1000
    assert Memory(limit=70_000).bytes() == 70_000
    assert repr(Memory()) == "Memory(limit=None)", "code, which tune() prints"


# -- what a process has ----------------------------------------------------------------------------

MACHINE = system.machine_memory()


def pretend(root: Path, groups: str | None, files: dict[str, str]) -> Path:
    """A root directory with a /proc/self/cgroup and some files of cgroups."""
    (root / "proc/self").mkdir(parents=True)
    if groups is not None:
        (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "12:pids:/job\n4:cpu,memory:/job/step\n3:name=systemd:/job\n"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        pytest.param(None, {}, MACHINE, id="no cgroups"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": "5000\n"}, 5000, id="v2, nested"),
        pytest.param(
            "0::/a/b\n",
            {"a/b/memory.max": "max\n", "a/memory.max": "7000\n", "memory.max": "9000\n"},
            7000,
            id="v2, an ancestor is stricter",
        ),
        pytest.param(
            "0::/docker/f00\n", {"memory.max": "6000\n"}, 6000, id="v2, only the root is mounted"
        ),
        pytest.param(
            "0::/a:b\n",
            {"a:b/memory.max": "5000\n"},
            5000,
            id="v2, a colon in the name",
            marks=posix,
        ),
        pytest.param(
            V1,
            {
                "memory/job/step/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
                "memory/job/memory.limit_in_bytes": "8000\n",
            },
            8000,
            id="v1, an ancestor is stricter",
        ),
        pytest.param(
            V1, {"memory/memory.limit_in_bytes": "3000\n"}, 3000, id="v1, only the root is mounted"
        ),
        pytest.param(
            V1 + "0::/v2\n",
            {"memory/job/memory.limit_in_bytes": "4000\n", "v2/memory.max": "3500\n"},
            3500,
            id="both",
        ),
        pytest.param("nonsense\n\n::\n", {"memory.max": "5000\n"}, MACHINE, id="nonsense"),
    ],
)
def test_what_a_process_has_is_the_least_of_the_machine_and_all_its_cgroups(
    groups: str | None, files: dict[str, str], limit: int, tmp_path: Path
) -> None:
    assert process_limit(pretend(tmp_path, groups, files)) == limit


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "16", "LOCAL_RANK": "3"}, 1),  # of all machines
        ({"LOCAL_WORLD_SIZE": " 8\n"}, 8),
        *(({"LOCAL_WORLD_SIZE": word}, 1) for word in ("", "0", "2.0", "9" * 5000)),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8,4"}, 1),  # nobody knows which of them this is
        ({"SLURM_NTASKS_PER_NODE": "8"}, 1),  # of the job, of which this may be a step of one task
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 8),  # torchrun within srun
        ({"LOCAL_WORLD_SIZE": "none", "MPI_LOCALNRANKS": "2"}, 2),
    ],
)
def test_the_number_of_ranks_follows_from_the_variables_of_launchers(
    environ: dict[str, str], ranks: int
) -> None:
    assert ranks_here(environ) == ranks


# -- what follows ----------------------------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Sized(Dataset[Any]):
    """Samples of given sizes in KB, filled with their index."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        size = self.sizes[index] * 256
        return torch.full((size,), float(index)), np.full(size, index, np.int32), index


def backends(limit: int, *kinds: str) -> list[Any]:
    """Some of the ways to make batches, with so many bytes."""
    tiny = Memory(limit=limit)
    ways: dict[str, tuple[Any, int]] = {
        "caller": (Inline(memory=tiny), 0),
        "threads": (Threads(memory=tiny), 2),
        "fork": (Fork(memory=tiny), 2),
        "spawn": (Spawn(memory=tiny), 1),
    }
    return [pytest.param(*ways[kind], id=kind) for kind in kinds or ways]


def assert_right(batch: Any, indices: range, sizes: list[int]) -> None:
    tensor, array, labels = batch
    assert labels.tolist() == list(indices)
    assert tensor.dtype is torch.float32
    assert array.dtype is torch.int32
    for row, index in enumerate(indices):
        assert tensor[row].shape == array[row].shape == (256 * sizes[index],)
        assert (tensor[row] == index).all()
        assert (array[row] == index).all()


def run(loader: Any, *, keep: bool, sizes: list[int]) -> list[str]:
    """One pass; all that was warned."""
    kept = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with iter(loader) as batches:
            for number, batch in enumerate(batches):
                at = range(number * loader.batch_size, (number + 1) * loader.batch_size)
                assert_right(batch, range(at.start, min(at.stop, len(sizes))), sizes)
                if keep:
                    kept.append((batch, at))
    assert not keep or len(kept) == len(loader)
    for batch, at in kept:  # what came later has not written over it
        assert_right(batch, range(at.start, min(at.stop, len(sizes))), sizes)
    return [str(w.message) for w in caught if "CPU" not in str(w.message)]


@pytest.mark.parametrize(("backend", "workers"), backends(3_000_000))
def test_who_keeps_all_batches_gets_them_all_right_and_one_warning_for_each_iterator(
    backend: Any, workers: int
) -> None:
    sizes = [200] * 40
    loader = DataLoader(Sized(sizes), 2, num_workers=workers, backend=backend)
    for _ in range(2):
        told = run(loader, keep=True, sizes=sizes)
        assert len(told) == 1
        assert "ordinary memory" in told[0]
        assert "Memory(limit=...)" in told[0]


@pytest.mark.parametrize(("backend", "workers"), backends(60_000_000, "threads", "fork"))
def test_samples_whose_sizes_change_from_batch_to_batch_arrive_right(
    backend: Any, workers: int
) -> None:
    sizes = [1, 700, 3, 290, 0, 2000, 31, 33, 260, 5, 900, 1, 4000, 64, 2, 1500, 300, 8]
    loader = DataLoader(Sized(sizes), 1, num_workers=workers, backend=backend)
    assert run(loader, keep=False, sizes=sizes) == []


def test_a_warning_that_is_an_error_loses_no_batch() -> None:
    sizes = [200] * 12
    loader = DataLoader(Sized(sizes), 2, num_workers=2, backend=Fork(memory=Memory(limit=1)))
    with iter(loader) as batches:  # warnings are errors here
        found = kinds(outcomes(batches))
    found.remove(UserWarning)
    assert [batch[2].tolist() for batch in found] == [[k, k + 1] for k in range(0, 12, 2)]


def rss_of_shared_memory() -> int:
    """Bytes of shared memory that this process has mapped and used."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssShmem in /proc/self/status")


@pytest.fixture
def shared_before() -> int:
    gc.collect()
    return rss_of_shared_memory()


@posix  # /proc/self/status
def test_slots_that_are_kept_stay_within_the_limit_and_are_freed_with_the_batches(
    shared_before: int,
) -> None:
    limit = 12_000_000
    sizes = [200] * 80
    chosen = Fork(memory=Memory(limit=limit))
    loader = DataLoader(Sized(sizes), 2, num_workers=2, backend=chosen)
    with pytest.warns(UserWarning, match="ordinary memory"), iter(loader) as batches:
        kept = list(batches)
    assert 0 < rss_of_shared_memory() - shared_before <= limit
    kept.clear()
    del batches
    gc.collect()
    assert rss_of_shared_memory() <= shared_before
