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
from support.platforms import posix

from hybridloader.backends.process.postmortem import OomWatch

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


NO_KILL = "No OOM kill was counted: another program or a person sent the signal"
LESS = "Try fewer workers, or backend='threads', which shares one copy of the dataset."


def test_an_empty_tree_tells_nothing(tmp_path: Path) -> None:
    unknown = "This platform does not report a lack of memory."
    assert OomWatch(tmp_path).describe("SIGKILL") == f"{unknown} If there was one: {LESS}"


def test_the_tightest_limit_counts_and_the_kills_of_the_own_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/job/step\n",
        **v2("slice/job/step", "max", 1, 2),
        **v2("slice/job", 500, 400, 3),
        **v2("slice", 800, 700, 4),
    }
    watch = OomWatch(tree(tmp_path, files))
    assert "cgroup 400.00 B of 500.00 B in use" in watch.describe("SIGKILL")
    tree(tmp_path, v2("slice/job/step", "max", 1, 5))
    assert "rose from 2 to 5; limit 500.00 B" in watch.describe("SIGKILL")


def test_in_a_container_the_mount_is_the_containers_own(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/abc\n", **v2("", 500, 400, 3)}
    assert "400.00 B of 500.00 B" in OomWatch(tree(tmp_path, files)).describe("SIGKILL")


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,memory:/job\n4:devices:/\n0::/\n",
        **v1("job", 500, 400, 3),
        **v1("", 9223372036854771712, 4000, 0),  # which says "no limit"
    }
    watch = OomWatch(tree(tmp_path, files))
    assert "cgroup 400.00 B of 500.00 B in use" in watch.describe("SIGKILL")
    (tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes").write_text("9223372036854771712")
    assert "cgroup 4" not in watch.describe("SIGKILL")


_FILES = (
    "proc/self/cgroup",
    "proc/vmstat",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.current",
    "sys/fs/cgroup/memory.events",
    "sys/fs/cgroup/memory/memory.oom_control",
)
_WORDS = st.sampled_from(
    ["0::/", "0::/\0", "3:memory:/..", "oom_kill", "oom_kill 3", "oom_kill -1", "max", "١٢", "12"]
)


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
    for signal in ("SIGKILL", "SIGBUS"):
        assert len(OomWatch(tmp_path).describe(signal).splitlines()) <= 2


def test_a_number_that_no_kernel_writes_tells_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", **v2("", "9" * 5_000, 1, 1)}
    assert "cgroup 1" not in OomWatch(tree(tmp_path, files)).describe("SIGKILL")


def test_a_file_that_is_a_folder_tells_nothing(tmp_path: Path) -> None:
    for name in _FILES:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert "does not report" in OomWatch(tmp_path).describe("SIGKILL")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the files of Linux")
def test_on_this_very_machine_no_kill_was_counted() -> None:
    assert OomWatch().describe("SIGKILL").startswith(NO_KILL)


# -- the watch ---------------------------------------------------------------------------------------


def job(root: Path, kills: int, used: int, machine: int = 0, limit: int = 2 * GIB) -> Path:
    files = {"proc/self/cgroup": "0::/job\n", "proc/vmstat": f"oom_kill {machine}\n"}
    return tree(root, files | v2("job", limit, used, kills))


def test_a_kill_that_was_counted_is_the_cause(tmp_path: Path) -> None:
    watch = OomWatch(job(tmp_path, 3, 1 * GIB, machine=7))
    assert watch.describe("SIGKILL").startswith(NO_KILL)  # those of before are not
    job(tmp_path, 4, int(1.98 * GIB))
    cause, now = watch.describe("SIGKILL").splitlines()
    assert cause == (
        "Likely cause: the cgroup's OOM killer struck (oom_kill rose from 3 to 4; limit 2.00 GiB, "
        f"in use 1.98 GiB). {LESS}"
    )
    assert now == "Memory now: cgroup 1.98 GiB of 2.00 GiB in use."


def test_a_kill_without_a_limit_is_told_without_one(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/job\n", **v2("job", "max", 5, 0)})
    watch = OomWatch(root)
    tree(root, v2("job", "max", 5, 1))
    assert watch.describe("SIGKILL") == (
        f"Likely cause: the cgroup's OOM killer struck (oom_kill rose from 0 to 1). {LESS}"
    )


def test_where_cgroups_count_nothing_the_machine_does(tmp_path: Path) -> None:
    watch = OomWatch(tree(tmp_path, {"proc/vmstat": "nr_free_pages 12\noom_kill 1\n"}))
    assert watch.describe("SIGKILL").startswith(NO_KILL)
    tree(tmp_path, {"proc/vmstat": "oom_kill 2\n"})
    assert "machine's OOM killer struck (oom_kill rose from 1 to 2" in watch.describe("SIGKILL")


@posix
@pytest.mark.parametrize(
    ("free", "used", "word"),
    [(0, 1, "/dev/shm is full"), (9, 10, "cgroup's limit"), (9, 1, "has become shorter")],
)
def test_a_bus_error_is_of_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, used: int, word: str
) -> None:
    asked = []

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_blocks=10, f_frsize=1024, f_bavail=free)

    monkeypatch.setattr(os, "statvfs", statvfs)
    cause, now = OomWatch(job(tmp_path, 0, used, limit=10)).describe("SIGBUS").splitlines()
    assert word in cause
    assert now.endswith(f"/dev/shm {f'{free}.00 KiB' if free else '0.00 B'} of 10.00 KiB free.")
    assert asked == [tmp_path / "dev/shm"]
