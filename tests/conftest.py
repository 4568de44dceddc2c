"""Fixtures of all tests: a test may leave nothing behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from support.platforms import FORK, ROOT

from hybridloader.errors import BackendUnavailable

pytest_plugins = ["support.fixtures"]

# No test is judged by the clock: on a busy machine any example may take longer than hypothesis's 0.2 s.
settings.register_profile("hybridloader", deadline=None)
settings.load_profile("hybridloader")

# Before torch is imported: threads of its operators would else spin while they wait, on cores that the
# other processes of a run need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ray runs its workers at niceness 15. Beside five busy programs on two cores, importing torch took them
# more than a minute.
os.environ.setdefault("RAY_worker_niceness", "0")

_HUGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""Setting for a process of pytest-xdist: glibc asks for huge pages, so a fork copies fewer page tables.

Tests with forked workers take a quarter less of the system's time.
"""

if os.environ.get(_HUGE_PAGES[0]) == _HUGE_PAGES[1]:
    del os.environ[
        _HUGE_PAGES[0]
    ]  # it is read when a process begins; those that tests start have none

if sys.platform == "linux" and sys.version_info >= (3, 14):
    # Linux's default before 3.14. What a left-out `backend` means by start method has tests of its own.
    multiprocessing.set_start_method("fork")

# A shell ignores Ctrl-C in what a script starts with `&`, and all processes below inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SHOWS_STACKS = getattr(signal, "SIGRTMAX", 64)
"""Signal at which this process and its forks write the stacks of their threads to stderr."""

_LOOKS_AT_STACKS = hasattr(faulthandler, "register") and (ROOT / "proc/self/status").exists()
if _LOOKS_AT_STACKS:
    faulthandler.register(_SHOWS_STACKS, all_threads=True)

_PATIENCE = 30.0
"""Seconds that what is already ending gets to be gone."""

_NODES = ("/dev/nvidia", "/dev/dri", "/dev/accel")
"""Paths of the drivers of devices: CUDA's, and those in the kernel."""


def _children() -> set[psutil.Process]:
    """Child processes, without the two trackers that Python and loky keep for the process's life.

    With those that have ended and that nobody asked how: they hold a number, and their starter
    descriptors.
    """
    found = set()
    for pid in _descendants(os.getpid()):
        try:
            child = psutil.Process(pid)
            line = " ".join(child.cmdline()) or _name(child)  # one that ends has none any more
        except psutil.ZombieProcess:
            line = _name(child)
        except (OSError, psutil.Error):
            continue
        if "resource_tracker" in line or "forkserver" in line or _of_ray(line):
            continue
        found.add(child)
    return found


def _name(child: psutil.Process) -> str:
    """Return the name of a process that has ended; it has no command line any more."""
    try:
        return child.name()
    except (OSError, psutil.Error):  # OSError: Wine, while a process starts or ends
        return ""


def _of_ray(line: str) -> bool:
    """True for a process of the session's Ray cluster, which starts and keeps workers as it likes."""
    return line.startswith("ray::") or "site-packages/ray/" in line


def _descendants(pid: int) -> list[int]:
    """Read the children from /proc by thread, if it is there: psutil reads all processes."""
    tasks = ROOT / "proc" / str(pid) / "task"
    if not (tasks / str(pid) / "children").exists():
        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except (OSError, psutil.Error):  # OSError: Wine, while a process starts
            return []
    found = []
    try:
        for task in tasks.iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    except OSError:  # it has just ended
        pass
    return found


def _wait_for_one(children: set[psutil.Process], seconds: float) -> None:
    """Wait until a child has ended. `psutil.wait_procs` would reap it, and hide that nobody else did."""
    lines = []
    for child in children:
        with contextlib.suppress(AttributeError, OSError, psutil.Error):  # gone, or no pidfd here
            if child.status() != psutil.STATUS_ZOMBIE:
                lines.append(os.pidfd_open(child.pid))
    try:
        wait(lines, seconds)
    finally:
        for line in lines:
            os.close(line)


def _opened() -> list[str]:
    """Return the targets of all open descriptors, the latest last."""
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):
            found.append(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def _descriptors() -> int:
    """Count the open descriptors, without those that the driver of a device opens as it needs them."""
    folder = ROOT / "proc/self/fd"
    if not folder.exists():
        return 0
    return sum(not _leads_to(folder / name).startswith(_NODES) for name in os.listdir(folder))


def _leads_to(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # that of the listing itself
        return ""


def _segments() -> set[str]:
    """Named shared memory that this process has made. A name tells which process that was."""
    return {name for name in _named() if name.startswith(f"hl-{os.getpid()}-")}


def _named() -> list[str]:
    folder = ROOT / "dev/shm"
    names = os.listdir(folder) if folder.exists() else []
    return [name for name in names if name.startswith("hl-")]


_BEFORE = frozenset(_named())

LEFT_OUT = ("full", "recipes", "frameworks")
"""Markers of tests that run only if `-m` or an argument names them."""

_OF_PROCESSES = tuple(
    f"tests/{folder}/" for folder in ("contract/backends", "inside", "properties", "storms")
)
"""Folders of tests for which each kind of process counts."""


@pytest.hookimpl(optionalhook=True)  # there is none without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes of ``-n logical``: half as many again as there are cores.

    Tests leave a fifth of the cores unused: they wait for workers that start, are stuck, or end.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    return cores * 3 // 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    os.environ.setdefault(*_HUGE_PAGES)


@pytest.hookimpl(tryfirst=True)  # before `-m full` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests with a marker of `LEFT_OUT`, unless `-m` names one or an argument names the test.

    A test that is given forked workers and other processes is `full` for the others, but in tests of the
    backends. They have one crew, one transport and the same slots; how they start is tested there.

    A deselection by `-m "not full"` in `addopts` would be lost as soon as somebody gives a `-m`.
    """
    names = {item.nodeid for item in items} if FORK else set()
    for item in items:
        twins = {item.nodeid.replace(other, "fork") for other in ("shared-memory", "spawn")}
        if not item.nodeid.startswith(_OF_PROCESSES) and (twins - {item.nodeid}) & names:
            item.add_marker("full")
    left = [marker for marker in LEFT_OUT if marker not in config.option.markexpr]
    if "full" not in left:
        return
    named = [part for argument in config.args for part in argument.split("::", 1)[1:]]
    kept, left_out = [], []
    for item in items:
        name = item.nodeid.partition("::")[2]
        marked = any(item.get_closest_marker(marker) for marker in left)
        asked = not marked or name.startswith(tuple(named))
        (kept if asked else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


# All of these need forks, signals or descriptors.
collect_ignore = [] if FORK else [
    "contract/backends/test_fresh_environment.py",
    "contract/backends/test_handles.py",
    "contract/backends/test_zygote.py",
    "inside/test_postmortem.py",
    "storms/test_exits.py",
    "benchmarks",
    "frameworks",
]  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from _applicable())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if _LOOKS_AT_STACKS and callable(end_test := signal.getsignal(signal.SIGALRM)):

        def with_stacks(*args: Any) -> None:
            _show_stacks_of_forks()
            end_test(*args)

        signal.signal(signal.SIGALRM, with_stacks)  # until pytest-timeout sets it for the next test
    return (yield from _applicable())


def _show_stacks_of_forks() -> None:
    """Have each fork of this process write its stacks: a test has timed out, and may wait for one."""
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            status = (ROOT / "proc" / str(pid) / "status").read_text()
            caught = int(status.split("SigCgt:")[1].split()[0], 16)
            if caught >> (_SHOWS_STACKS - 1) & 1:
                os.kill(pid, _SHOWS_STACKS)
    time.sleep(0.5)  # nothing reports that they have written


def _applicable() -> Iterator[None]:
    """Skip a test that needs a fork or a name of POSIX itself where there is none.

    A name or module that the library lacks fails it, also in a worker.
    """
    try:
        return (yield)
    except (AttributeError, ImportError, BackendUnavailable, ValueError) as error:
        if hasattr(os, "fork") or not re.search(
            r"needs fork|context for 'fork|a valid start method|no start method 'fork"
            r"|No module named '(fcntl|resource)'|module '(os|signal|socket|multiprocessing)' has no",
            str(error),
        ):
            raise
        *_, last = traceback.extract_tb(error.__traceback__)
        refused = isinstance(error, (BackendUnavailable, ValueError))
        if not refused and "tests" not in Path(last.filename).parts:
            raise
        pytest.skip(f"this platform has none: {error}"[:80])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a process that has ended left named shared memory.

    Only here, where no test runs any more: what a killed process leaves goes with its last worker, and
    tests run in several processes at once.
    """
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
        return
    left = [name for name in _named() if not psutil.pid_exists(int(name.split("-")[1]))]
    left = sorted({*left} - _BEFORE)
    if left:
        print(f"\nleft segments: {left}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _trackers_running() -> None:
    """Start what lives as long as the process, so that no single test seems to have left it."""
    from multiprocessing import resource_tracker

    import torch.utils.data  # noqa: F401
    from loky.backend.resource_tracker import _resource_tracker

    if FORK:
        resource_tracker.ensure_running()
    _resource_tracker.ensure_running()
    gc.collect()
    gc.freeze()  # a collection over all that torch imports would take 100 ms, twice a test


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray cluster that all tests of a session share: starting one takes 4 s."""
    ray = pytest.importorskip("ray")
    os.environ |= {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else Ray warns of a change to come
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # its workers import modules of the tests
    ray.init(
        "local",  # else it connects to a cluster that runs here, or ran: /tmp/ray/ray_current_cluster
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=400 << 20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    del os.environ["PYTHONPATH"]
    if before is not None:
        os.environ["PYTHONPATH"] = before
    ray.put(b"").future().result()  # a thread of Ray's appears with the first
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child, a thread, a descriptor or a segment behind.

    A collection takes some 10 ms, as often as there are tests; so it is only made if something is left.
    """
    children, threads = _children(), set(threading.enumerate())
    descriptors, segments = _descriptors(), _segments()
    yield
    markers = ["forkserver", "ray"]
    if sys.version_info[:2] == (3, 13) and not getattr(sys, "_is_gil_enabled", lambda: True)():
        markers.append("classes")
    keeps = any(map(request.node.get_closest_marker, markers))
    if (
        _descriptors() <= descriptors
        and not set(threading.enumerate()) - threads
        and not _children() - children
        and _segments() <= segments
    ):
        return
    deadline = time.monotonic() + _PATIENCE
    while _children() - children or set(threading.enumerate()) - threads:
        gc.collect()  # does nothing while another thread is collecting, hence again
        for thread in set(threading.enumerate()) - threads:
            thread.join(0.05)
        _wait_for_one(_children() - children, 0.05)
        if time.monotonic() > deadline:
            break
    gc.collect()
    left = [*(_children() - children), *(set(threading.enumerate()) - threads)]
    assert not left, f"left child processes or threads: {left}"
    assert _segments() <= segments, f"left segments: {_segments() - segments}"
    if not keeps:
        gc.collect()
        while _descriptors() > descriptors and time.monotonic() < deadline:
            wait([], 0.05)  # a thread of another library, such as loky's, closes one late
            gc.collect()
        assert _descriptors() <= descriptors, f"left descriptors open, of {_opened()}"
    gc.freeze()  # what tests have imported since is a million objects: half a second, each time
