"""Cores that a process may use, read from files that a test writes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hybridloader.observe import cores
from hybridloader.observe.cores import CoreUsage, affinity, available, limit, read
from hybridloader.pipeline.operators.work import Placement

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files of Linux")


def machine(folder: Path, cgroup: str, files: dict[str, str], stat: str = "") -> tuple[Path, Path]:
    """The folders of a machine's cgroups and of its processes."""
    cgroups, proc = folder / "cgroup", folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "stat").write_text(stat)
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cgroups, proc


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/job/mine\n", {"job/mine/cpu.max": "50000 100000\n"}, 0.5),
        (
            "0::/job/mine\n",
            {"job/cpu.max": "25000 100000\n", "job/mine/cpu.max": "max 100000\n"},
            0.25,
        ),
        ("0::/\n", {"cpu.max": "30000 100000"}, 0.3),
        (
            "4:cpu:/job\n0::/\n",
            {"cpu/job/cpu.cfs_quota_us": "75000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            0.75,
        ),
        (
            "4:cpu:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "1"},
            None,
        ),
        (
            "4:cpuacct,cpu:/job\n",
            {
                "cpuacct,cpu/job/cpu.cfs_quota_us": "75000\n",
                "cpuacct,cpu/job/cpu.cfs_period_us": "100000\n",
            },
            0.75,
        ),
        ("4:cpuset:/job\n", {"cpuset/job/cpu.max": "50000 100000"}, None),
        ("0::/job\n", {"job/cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_a_quota_limits_the_cores(
    cgroup: str, files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    found = available(*machine(tmp_path, cgroup, files))
    assert found == (len(affinity()) if cores is None else cores)


@pytest.mark.parametrize(("quota", "workers"), [(250_000, 3), (20_000, 1), ("max", 64)])
def test_a_step_has_a_worker_for_each_core_by_default(
    quota: int | str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = machine(tmp_path, "0::/job\n", {"job/cpu.max": f"{quota} 100000\n"})
    monkeypatch.setattr(cores, "affinity", lambda: set(range(64)))
    monkeypatch.setattr(cores, "limit", lambda *_: limit(*files))
    placement = Placement.of("map", {"backend": "threads"})
    assert placement.num_workers == workers


def test_no_files_limit_nothing(tmp_path: Path) -> None:
    assert available(tmp_path, tmp_path) == len(affinity())
    assert limit(tmp_path, tmp_path).folder is None
    for folder in (None, tmp_path):
        reading = read({0}, folder, tmp_path)
        assert reading.busy is None
        assert reading.throttled == reading.periods == 0


def test_only_the_cores_of_this_process_count(tmp_path: Path) -> None:
    stat = (
        "cpu 9 9 9 9 9 9 9 9\ncpu0 100 0 50 900 7 1 2 3 0 0\ncpu1 1000 0 0 0 0 0 0 0 0 0\nintr 1\n"
    )
    _, proc = machine(tmp_path, "0::/job\n", {}, stat)
    assert read({0}, None, proc).busy == 156 / os.sysconf("SC_CLK_TCK")


STATS = [
    ({"cpu.stat": "usage_usec {us}\nnr_periods {n}\nnr_throttled {t}\nthrottled_usec 9\n"}),
    ({"cpu.stat": "nr_periods {n}\nnr_throttled {t}\n", "cpuacct.usage": "{us}000\n"}),
]


@pytest.mark.parametrize("stats", STATS, ids=["version 2", "version 1"])
@pytest.mark.parametrize(
    ("quota", "used", "busy"), [(0.5, 0.2, 0.2), (0.5, 0.5, 0.5), (0.5, 0.7, 0.5), (1e6, 0.2, None)]
)
def test_under_a_quota_the_work_of_the_cgroup_counts(
    stats: dict[str, str],
    quota: float,
    used: float,
    busy: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container sees all cores of its host, which others keep busy."""
    files = {"job/cpu.max": f"{quota * 100_000:.0f} 100000"}
    cgroups, proc = machine(tmp_path, "0::/job/inner\n", files, "cpu0 9 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(cores, "limit", lambda: limit(cgroups, proc))
    monkeypatch.setattr(time, "perf_counter", lambda: clock)

    def worked(seconds: float, periods: int, cut_short: int) -> None:
        for name, text in stats.items():
            path = cgroups / "job" / name
            path.write_text(text.format(us=int(seconds * 1e6), n=periods, t=cut_short))

    clock = 100.0
    worked(7.0, 50, 20)
    usage = CoreUsage()
    clock = 110.0
    worked(7.0 + 10 * used, 150, 45)
    use = usage.use()
    assert use.cores == min(quota, len(affinity()))
    if busy is not None:
        assert use.busy == pytest.approx(busy)
        assert use.throttled == 0.25
    else:
        assert use.throttled == 0, "the quota is no limit"


def test_this_process_is_seen_to_work() -> None:
    usage = CoreUsage()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    usage.end()
    use = usage.use()
    assert use.cores == available()
    assert use.own is not None
    assert 0 < use.own <= len(affinity()) + 0.5
    assert usage.use(10.0).own > use.own  # type: ignore[operator]
