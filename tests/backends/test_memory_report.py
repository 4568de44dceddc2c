"""Reports of memory: figures read from trees of files made up for it, and put into words."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridloader.backends.process import memory_report
from hybridloader.backends.process.memory_report import MemoryReport, OomWatch, read

GIB = 1 << 30


def tree(root: Path, files: dict[str, Any]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def v2(path: str, limit: Any, used: int, kills: int) -> dict[str, Any]:
    place = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{place}/memory.max": limit,
        f"{place}/memory.current": used,
        f"{place}/memory.events": f"low 0\noom 7\noom_kill {kills}\noom_group_kill 9\n",
    }


def v1(path: str, limit: int, used: int, kills: int) -> dict[str, Any]:
    place = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    return {
        f"{place}/memory.limit_in_bytes": limit,
        f"{place}/memory.usage_in_bytes": used,
        f"{place}/memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
    }


def test_an_empty_tree_tells_nothing(tmp_path: Path) -> None:
    assert read(tmp_path) == MemoryReport()
    assert (
        OomWatch(tmp_path).describe()
        == "This platform does not report whether the system ran out of memory."
    )
    assert "struck" not in OomWatch(tmp_path).describe()


def test_everything_that_linux_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/vmstat": "nr_free_pages 12\noom_kill 5\n",
        "proc/meminfo": "MemTotal:  100 kB\nMemAvailable:   64 kB\n",
        "proc/self/limits": (
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            "Max address space         12345                unlimited            bytes     \n"
        ),
        **v2("job", 1000, 900, 3),
    }
    looked_at = []

    def statvfs(path: Any) -> Any:
        looked_at.append(Path(path))
        return SimpleNamespace(f_blocks=10, f_frsize=4096, f_bavail=4)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert read(tree(tmp_path, files)) == MemoryReport(
        limit=1000,
        used=900,
        cgroup_kills=3,
        machine_kills=5,
        shm_size=40960,
        shm_free=16384,
        available=65536,
        address_space=12345,
    )
    assert looked_at == [tmp_path / "dev/shm"]


def test_the_tightest_limit_counts_and_the_kills_of_the_own_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/job/step\n",
        **v2("slice/job/step", "max", 1, 2),
        **v2("slice/job", 500, 400, 3),
        **v2("slice", 800, 700, 4),
    }
    state = read(tree(tmp_path, files))
    assert (state.limit, state.used, state.cgroup_kills) == (500, 400, 2)


def test_in_a_container_the_mount_is_the_containers_own(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/abc\n", **v2("", 500, 400, 3)}
    state = read(tree(tmp_path, files))
    assert (state.limit, state.used, state.cgroup_kills) == (500, 400, 3)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,memory:/job\n4:devices:/\n0::/\n",
        **v1("job", 500, 400, 3),
        **v1("", 9223372036854771712, 4000, 0),  # which says "no limit"
    }
    state = read(tree(tmp_path, files))
    assert (state.limit, state.used, state.cgroup_kills) == (500, 400, 3)
    (tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes").write_text("9223372036854771712")
    assert read(tmp_path).limit is None


_FILES = (
    "proc/self/cgroup",
    "proc/vmstat",
    "proc/meminfo",
    "proc/self/limits",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.events",
    "sys/fs/cgroup/memory/memory.oom_control",
)
_WORDS = st.sampled_from(
    [
        "0::/", "0::/\0", "3:memory:/..", "oom_kill", "oom_kill 3", "oom_kill -1", "max", "١٢", "12",
        "Max address space", "Max address space  7", "MemAvailable:",
        "MemAvailable: 99999999999999999999",
    ]
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.dictionaries(st.sampled_from(_FILES), st.one_of(st.binary(max_size=40), st.lists(_WORDS)))
)
def test_whatever_the_files_hold_reading_them_does_not_raise(
    tmp_path: Path, contents: dict[str, bytes | list[str]]
) -> None:
    for name in _FILES:
        path = tree(tmp_path, {name: ""}) / name
        content = contents.get(name, b"")
        path.write_bytes("\n".join(content).encode() if isinstance(content, list) else content)
    state = read(tmp_path)
    for value in vars(state).values():
        assert value is None or (type(value) is int and value >= 0)
    assert len(OomWatch(tmp_path).describe().splitlines()) <= 2


def test_a_number_that_no_kernel_writes_tells_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", **v2("", "9" * 5_000, 1, 1)}
    assert read(tree(tmp_path, files)).limit is None


def test_a_file_that_is_a_folder_tells_nothing(tmp_path: Path) -> None:
    for name in _FILES:
        (tmp_path / name).mkdir(parents=True)
    assert read(tmp_path).limit is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the files of Linux")
def test_of_this_very_machine_it_tells_the_available_memory() -> None:
    state = read()
    assert state.available is not None
    assert 0 < state.available < 1 << 50
    assert state.machine_kills is not None
    assert "struck" not in OomWatch().describe()


# -- the watch ---------------------------------------------------------------------------------------


def job(root: Path, kills: int, used: int, machine: int = 0, limit: int = 2 * GIB) -> Path:
    files = {"proc/self/cgroup": "0::/job\n", "proc/vmstat": f"oom_kill {machine}\n"}
    return tree(root, files | v2("job", limit, used, kills))


def test_a_kill_that_was_counted_is_the_cause(tmp_path: Path) -> None:
    watch = OomWatch(job(tmp_path, 3, 1 * GIB))
    assert "struck" not in watch.describe()
    job(tmp_path, 4, int(1.98 * GIB))
    assert "struck" in watch.describe()
    cause, now = watch.describe().splitlines()
    assert cause == (
        "Likely cause: the cgroup's OOM killer struck (oom_kill rose from 3 to 4; limit 2.00 GiB, "
        "in use 1.98 GiB)."
    )
    assert now == "Memory now: cgroup 1.98 GiB of 2.00 GiB in use."


def test_a_kill_of_before_is_not(tmp_path: Path) -> None:
    watch = OomWatch(job(tmp_path, 3, 1 * GIB, machine=7))
    assert watch.describe().startswith(
        "No OOM kill was counted: another program or a person sent the signal"
    )
    assert "struck" not in watch.describe()


def test_a_kill_without_a_limit_is_told_without_one(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/job\n", **v2("job", "max", 5, 0)})
    watch = OomWatch(root)
    tree(root, v2("job", "max", 5, 1))
    assert watch.describe() == (
        "Likely cause: the cgroup's OOM killer struck (oom_kill rose from 0 to 1)."
    )


def test_a_full_cgroup_without_a_kill_points_to_somebody_who_watches_it(tmp_path: Path) -> None:
    text = OomWatch(job(tmp_path, 0, int(1.95 * GIB))).describe()
    assert "No OOM kill was counted, but the cgroup has 1.95 GiB of 2.00 GiB in use" in text


def test_where_cgroups_count_nothing_the_machine_does(tmp_path: Path) -> None:
    watch = OomWatch(tree(tmp_path, {"proc/vmstat": "oom_kill 1\n"}))
    assert "No OOM kill was counted" in watch.describe()
    tree(tmp_path, {"proc/vmstat": "oom_kill 2\n"})
    assert "the machine's OOM killer struck (oom_kill rose from 1 to 2" in watch.describe()


def test_a_kill_in_another_cgroup_is_told_as_such(tmp_path: Path) -> None:
    watch = OomWatch(job(tmp_path, 0, 1, machine=1))
    job(tmp_path, 0, 1, machine=2)
    assert "in another cgroup" in watch.describe()


@pytest.mark.parametrize(
    ("free", "used", "word"),
    [(0, 1, "/dev/shm is full"), (9, 10, "cgroup's limit"), (9, 1, "has become shorter")],
)
def test_a_bus_error_is_of_shared_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, used: int, word: str
) -> None:
    state = MemoryReport(limit=10, used=used, shm_size=10, shm_free=free)
    monkeypatch.setattr(memory_report, "read", lambda root: state)
    cause, now = OomWatch().describe("SIGBUS").splitlines()
    assert word in cause
    assert f"/dev/shm {free} B of 10 B free" in now


def test_other_signals_get_the_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    state = MemoryReport(available=3 * GIB, address_space=GIB // 2)
    monkeypatch.setattr(memory_report, "read", lambda root: state)
    assert OomWatch().describe("SIGSEGV") == (
        "Memory now: machine 3.00 GiB available, ulimit -v 512.00 MiB."
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5 << 40, "5.00 TiB"),
        (3 << 51, "6144.00 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert memory_report._size(count) == text
