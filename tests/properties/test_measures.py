"""Cores that a process may use, read from files that a test writes, and seconds of a stage."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted import FakeClock

from hybridloader import Pipeline, Threads
from hybridloader._support.threads import REMEMBERED
from hybridloader.engine import ByReference, Done
from hybridloader.fetching.readers import Step, WorkFetch
from hybridloader.observe import measures as measures_module
from hybridloader.observe.measures import (
    BRIEF,
    CoreUsage,
    LoopWaits,
    StageMeasures,
    affinity,
    limit,
    share,
)

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
        (
            "0::/job/mine\n",
            {"job/cpu.max": "25000 100000\n", "job/mine/cpu.max": "max 100000\n"},
            0.25,
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
    ],
)
def test_a_quota_limits_the_cores(
    cgroup: str, files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    found = limit(*machine(tmp_path, cgroup, files)).cores
    assert found == (len(affinity()) if cores is None else cores)


SHARES: list[tuple[int, int, str, str | None, float]] = [
    # Ranks, cores of the affinity, quota, cpuset of the cgroup; cores of a machine of 64 for a rank.
    (1, 64, "max", None, 64),
    (8, 64, "max", None, 8),
    (8, 8, "max", None, 8),  # bound to its own: not divided again
    (8, 4, "max", None, 4),
    (8, 32, "max", None, 8),  # bound to half of the machine, as three others are
    (4, 16, "max", "0-7,16-23", 4),  # a container of 16 cores, shared by four
    (4, 4, "max", "0-7,16-23", 4),
    (4, 16, "max", "0", 0.25),
    (4, 64, "1600000", None, 4),  # a quota is of all ranks
    (4, 8, "1600000", None, 4),
    (4, 2, "1600000", None, 2),
    (4, 64, "max", "nonsense", 16),
]


@pytest.mark.parametrize(("ranks", "bound", "quota", "cpuset", "found"), SHARES)
def test_ranks_share_the_cores_of_a_machine(
    ranks: int,
    bound: int,
    quota: str,
    cpuset: str | None,
    found: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {"job/cpu.max": f"{quota} 100000\n"}
    if cpuset is not None:
        files["job/cpuset.cpus.effective"] = f"{cpuset}\n"
    monkeypatch.setattr(measures_module, "affinity", lambda: set(range(bound)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert share(ranks, *machine(tmp_path, "0::/job\n", files)) == found
    first = {"cpuset/job/cpuset.effective_cpus": f"{cpuset}\n"}  # of version 1
    if cpuset is not None and quota == "max":
        assert share(ranks, *machine(tmp_path / "1", "4:cpuset:/job\n", first)) == found


@pytest.mark.parametrize(("ranks", "workers", "shown"), [("8", 8, True), ("1", 64, False)])
def test_a_step_has_a_worker_for_each_core_of_its_rank_and_the_table_tells(
    ranks: str, workers: int, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(measures_module, "affinity", lambda: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(measures_module, "text_of", lambda path: "")
    pipe = Pipeline.from_dataset(range(3)).map(abs, backend="threads")
    table = str(pipe.map(str, backend="fork", num_workers=3))
    assert f"threads x {workers} " in table
    assert "fork x 3 " in table
    assert table.count("cores of 1 of 8 ranks") == shown
    assert CoreUsage().use().share == (8 if shown else None)


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
    monkeypatch.setattr(measures_module, "limit", lambda: limit(cgroups, proc))
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


# -- waits of a loop ---------------------------------------------------------------------------------


def test_each_wait_of_a_loop_is_brief_or_kept_or_dropped_and_its_seconds_count() -> None:
    waits = LoopWaits()
    for number in range(REMEMBERED + 8):
        waits.items += 1
        waits.note(number, number + (0.5 if number >= 5 else BRIEF / 2))
    record = waits.record()
    assert (record.items, record.brief, record.dropped) == (REMEMBERED + 8, 5, 3)
    assert record.brief_seconds == pytest.approx(5 * BRIEF / 2)
    assert record.waited == pytest.approx(record.brief_seconds + 0.5 * (REMEMBERED + 3))
    assert [wait.began for wait in record.waits] == [*range(8, REMEMBERED + 8)]


# -- seconds of a stage ----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 3), st.booleans()), max_size=20))
def test_seconds_without_work_are_starved_or_blocked(
    moves: list[tuple[float, int, bool]],
) -> None:
    clock = FakeClock(100.0)
    measures = StageMeasures(
        Threads(), WorkFetch((Step("map", abs),)), 3, 1, each=True, clock=clock
    )
    busy = starved = elapsed = 0.0
    idle, starving = 3, True
    measures.idle(3, starved=True)
    for seq, (seconds, next_idle, next_starving) in enumerate(moves):
        clock.now += seconds
        elapsed += seconds
        starved += idle * seconds if starving else 0.0
        measures.came(Done(0, seq, ByReference([]), (3 - idle) * seconds), math.inf)
        busy += (3 - idle) * seconds
        idle, starving = next_idle, next_starving
        measures.idle(idle, starved=starving)
    assert measures.worked == pytest.approx(busy)
    assert measures.starved == pytest.approx(starved)
    assert measures.elapsed == pytest.approx(elapsed)
    assert measures.blocked == pytest.approx(3 * elapsed - busy - starved, abs=1e-6)
    measures.close()
    clock.now += 50
    measures.close()
    assert measures.elapsed == pytest.approx(elapsed)
