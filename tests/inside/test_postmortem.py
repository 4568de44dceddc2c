"""What is known of a worker after its death: its sample, its stack, and the memory of the machine.

Records in forked processes, stack dumps as text and on request, and reports of memory from trees of
files made up for them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.failing_datasets import Samples, at_gate, load, start
from support.platforms import needs_fork

from hybridloader import WorkerDied, WorkerTimeout
from hybridloader.backends.process import postmortem
from hybridloader.backends.process.postmortem import MOST, OomWatch, PostmortemRecord, shortened
from hybridloader.engine import TaskContext
from hybridloader.testing import Gate

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")
pytestmark = needs_fork

# -- a crash -----------------------------------------------------------------------------------------


def crash_in_native_code() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def crash_after_a_fork_has() -> None:
    pid = os.fork()
    if pid == 0:
        grandchild()
    os.waitpid(pid, 0)
    crash_in_native_code()


def grandchild() -> None:
    os.abort()


def crash_with_a_faulthandler_of_its_own() -> None:
    faulthandler.enable(open(os.devnull, "w"))  # noqa: SIM115  # it is to stay open
    crash_in_native_code()


@pytest.mark.parametrize(
    ("die", "words", "never"),
    [
        (crash_in_native_code, ["SIGSEGV", "The thread that crashed"], ["Extension modules"]),
        (abort, ["SIGABRT", "Fatal Python error: Aborted", "in abort"], []),
        (crash_after_a_fork_has, ["SIGSEGV", "in crash_in_native_code"], ["in grandchild"]),
        (crash_with_a_faulthandler_of_its_own, ["SIGSEGV"], ["in crash_in_native_code"]),
    ],
)
def test_a_crash_is_told_with_the_python_stack_of_its_thread(
    die: Callable[[], None], words: list[str], never: list[str]
) -> None:
    def sample(index: int) -> None:
        quiet()
        die()

    with pytest.raises(WorkerDied) as caught:
        list(load(Samples(sample), "fork"))
    told = str(caught.value)
    assert [word for word in words if word not in told] == []
    assert [word for word in never if word in told] == []


def quiet() -> None:
    """Keep what a dying process has to say out of the log."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


# -- a stack that is asked for -----------------------------------------------------------------------


def told(iterator: Any, *words: str) -> str:
    """Wait for a batch until an error has all these words, and return its text."""
    while True:
        with pytest.raises((WorkerTimeout, WorkerDied)) as caught:
            next(iterator)
        text = str(caught.value)
        if all(word in text for word in words):
            return text
        assert not isinstance(caught.value, WorkerDied), text


def test_a_stack_that_was_asked_for_is_no_crash_and_a_crash_after_it_is_told() -> None:
    gate = Gate()

    def sample(index: int) -> None:
        quiet()
        gate.arrive()
        crash_in_native_code()

    iterator = start(load(Samples(sample), "fork", timeout=0.2))
    gate.await_arrivals()
    assert "Fatal" not in told(iterator, "in arrive")
    gate.open()
    assert "in arrive" not in told(iterator, "SIGSEGV", "in crash_in_native_code")


def test_native_code_that_holds_the_gil_does_not_keep_its_stack_back() -> None:
    read, write = os.pipe()

    def holds_the_gil(index: int) -> int:
        if index == 0:
            ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)  # begun anew later
        return index

    with start(load(Samples(holds_the_gil, 2), "fork", timeout=0.2)) as iterator:
        told(iterator, "in holds_the_gil")
        os.write(write, b"!")  # the worker was not disturbed
        assert list(patient(iterator)) == [[0], [1]]
    os.close(read)
    os.close(write)


def patient(iterator: Any) -> Iterator[Any]:
    """Yield batches, however late they come."""
    while True:
        try:
            yield next(iterator)
        except WorkerTimeout:
            continue
        except StopIteration:
            return


@linux
def test_a_stopped_worker_is_told_and_answers_later() -> None:
    gate = Gate()
    with start(load(Samples(at_gate(gate, 0), 2), "fork", timeout=0.2)) as iterator:
        [worker] = iterator._workers
        gate.await_arrivals()
        os.kill(worker.pid, signal.SIGSTOP)
        told(iterator, "T (stopped)")
        os.kill(worker.pid, signal.SIGCONT)
        told(iterator, "in arrive")
        gate.open()
        assert list(patient(iterator)) == [[0], [1]]


def test_threads_of_the_users_are_told_and_ours_are_not() -> None:
    gate = Gate()

    def sample(index: int) -> int:
        if index == 0:
            ready, done = threading.Event(), threading.Event()

            def the_users_thread() -> None:
                ready.set()
                done.wait()

            thread = threading.Thread(target=the_users_thread)
            thread.start()
            ready.wait()
            gate.arrive()
            done.set()
            thread.join()
        return index

    with start(load(Samples(sample, 2), "fork", timeout=0.2)) as iterator:
        gate.await_arrivals()
        text = told(iterator, "in the_users_thread")
        assert text.index("in arrive") < text.index("Another thread")
        assert "_watch" not in text
        assert "_bootstrap" not in text
        gate.open()
        assert list(patient(iterator)) == [[0], [1]]


def test_why_a_worker_has_no_stack_is_told() -> None:
    record = PostmortemRecord.make()
    assert record is not None

    def refused(error: OSError) -> Callable[[int], None]:
        def send(signum: int) -> None:
            assert signum == 50
            raise error

        return send

    assert record.stack(7, refused(OSError()))[1].startswith("it has not yet started far enough")
    os.pwrite(record.fd, postmortem._NUMBERS.pack(50, 7, -1, -1), 0)
    assert record.stack(7, refused(ProcessLookupError())) == ("", "it has ended")
    _, why = record.stack(7, refused(PermissionError(1, "Not permitted")))
    assert why == "the signal for its stack could not be sent: [Errno 1] Not permitted"
    assert record.stack(7, lambda signum: record.close()) == ("", "it was ended meanwhile")
    assert record.end() == ("", "")
    assert record.task is None


@linux
@pytest.mark.parametrize("spare", [range(0), range(signal.SIGINT, signal.SIGINT + 1)])
def test_where_every_signal_is_in_use_there_is_none_to_ask_for_a_stack(
    spare: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postmortem.system, "spare_signals", lambda: spare)
    assert postmortem.free_signal() is None


# -- dumps as text -----------------------------------------------------------------------------------


def _frame(path: str, function: str, line: int = 1) -> str:
    return f'  File "{path}", line {line} in {function}'


CHILD = str(Path(postmortem.__file__).with_name("child.py"))


WORKER = str(Path(TaskContext.__init__.__code__.co_filename).with_name("worker.py"))


def test_a_deep_stack_keeps_its_inner_end() -> None:
    frames = [_frame(f"/a/long/path/to/some/module_{i}.py", f"function_{i}") for i in range(100)]
    text = "\n".join(["Current thread 0x1 (most recent call first):", *frames])
    text = shortened(text, "The thread that does the tasks")
    assert len(text) <= MOST
    assert text.splitlines()[1] == "  ... (80 frames omitted)"
    assert text.splitlines()[2:] == frames[19::-1]


ALONE = "<Cannot show all threads while the GIL is disabled>"


@pytest.mark.parametrize(
    "heading",
    [
        ["", "Current thread 0x00ff [MainThread] (most recent call first):"],
        pytest.param(["", ALONE, "Stack (most recent call first):"], id="without a GIL"),
    ],
)
def test_what_python_3_14_writes_of_a_crash_is_told_too_but_for_the_loop_and_what_is_around_it(
    heading: list[str],
) -> None:
    text = "\n".join(
        [
            "Fatal Python error: Segmentation fault",
            *heading,
            _frame("/their/dataset.py", "__getitem__"),
            _frame(WORKER, "run"),
            _frame(CHILD, "main"),
            _frame("/their/train.py", "<module>"),
            "",
            "Current thread's C stack trace (most recent call first):",
            '  Binary file "/lib/libc.so.6", at +0x1234',
            "",
            "Extension modules: numpy (total: 1)",
        ]
    )
    assert shortened(text, "The thread that crashed").splitlines() == [
        "Fatal Python error: Segmentation fault",
        *heading[1:-1],
        "The thread that crashed (most recent call last):",
        _frame("/their/dataset.py", "__getitem__"),
        "Current thread's C stack trace (most recent call last):",
        '  Binary file "/lib/libc.so.6", at +0x1234',
    ]


# -- reports of memory -------------------------------------------------------------------------------

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


LESS = "Try fewer workers, or backend='threads', which shares one copy of the dataset."
NO_LIMIT_OF_V1 = 9223372036854771712
KILLED = "Likely cause: the cgroup's OOM killer struck (oom_kill rose from"
NOBODY = "No OOM kill was counted: another program or a person sent the signal"

REPORTS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    (
        "nothing is known",
        {},
        {},
        [f"This platform does not report a lack of memory. If there was one: {LESS}"],
    ),
    (
        "the tightest limit counts, and the kills of the own group",
        {
            "proc/self/cgroup": "0::/slice/job/step\n",
            **v2("slice/job/step", "max", 1, 2),
            **v2("slice/job", 500, 400, 3),
            **v2("slice", 800, 700, 4),
        },
        v2("slice/job/step", "max", 1, 5),
        [
            f"{KILLED} 2 to 5). {LESS}",
            "Memory now: cgroup 400.00 B of 500.00 B in use.",
        ],
    ),
    (
        "in a container the mount is its own, and earlier kills are none",
        {"proc/self/cgroup": "0::/docker/abc\n", **v2("", 2 * GIB, GIB, 3)},
        {"proc/vmstat": "oom_kill 7\n"},
        [NOBODY, "Memory now: cgroup 1.00 GiB of 2.00 GiB in use."],
    ),
    (
        "version 1, and no limit above",
        {
            "proc/self/cgroup": "5:cpu,memory:/job\n4:devices:/\n0::/\n",
            **v1("job", 500, 400, 3),
            **v1("", NO_LIMIT_OF_V1, 4000, 0),
        },
        {},
        [NOBODY, "Memory now: cgroup 400.00 B of 500.00 B in use."],
    ),
    (
        "a kill without a limit",
        {"proc/self/cgroup": "0::/job\n", **v2("job", "max", 5, 0)},
        v2("job", "max", 5, 1),
        [f"{KILLED} 0 to 1). {LESS}"],
    ),
    (
        "where cgroups count nothing, the machine does",
        {"proc/vmstat": "nr_free_pages 12\noom_kill 1\n"},
        {"proc/vmstat": "oom_kill 2\n"},
        ["Likely cause: the machine's OOM killer struck (oom_kill rose from 1 to 2"],
    ),
]
"""Names, files as a worker starts, those that change, and the beginnings of the lines of a report."""


@pytest.mark.parametrize(
    ("before", "later", "lines"),
    [pytest.param(*rest, id=name) for name, *rest in REPORTS],
)
def test_what_the_kernel_counts_is_told_of_a_killed_worker(
    before: dict[str, Any], later: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    watch = OomWatch(tree(tmp_path, before))
    tree(tmp_path, later)
    found = watch.describe().splitlines()
    assert [line[: len(start)] for line, start in zip(found, lines, strict=True)] == lines
