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
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.platforms import posix

from hybridloader.backends.process import postmortem
from hybridloader.backends.process.child import ParentWatch
from hybridloader.backends.process.postmortem import (
    MOST,
    OomWatch,
    PostmortemRecord,
    PostmortemWriter,
    shortened,
)
from hybridloader.engine import (
    TaskContext,
)

PATIENCE = 60.0
"""Seconds; never reached when all is well."""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")


class Child:
    """A forked process with the worker's side of a record, and a pipe each way."""

    def __init__(self, record: PostmortemRecord, body: Callable[[Child], Any]) -> None:
        self.here, there = os.pipe(), os.pipe()
        self.told, self.tell = there[0], self.here[1]
        self.read_end, self.write_end = self.here[0], there[1]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self.read_end)
                os.close(self.write_end)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)  # what dying processes have to say
                side = PostmortemWriter.open(record.fd)
                assert side is not None
                self.side = side
                body(self)
                code = 0
            finally:
                os._exit(code)
        os.close(self.told)
        os.close(self.tell)

    # in the child
    def stuck(self) -> None:
        """Says so, and is, until the parent lets it go."""
        os.write(self.tell, b"!")
        os.read(self.told, 1)

    # in the parent
    def hear(self) -> bytes:
        return os.read(self.read_end, 1)

    def let_go(self) -> None:
        os.write(self.write_end, b"!")

    def end(self) -> int:
        """The exit code of `os.waitstatus_to_exitcode`."""
        os.close(self.write_end)
        os.close(self.read_end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def child(record: PostmortemRecord, body: Callable[[Child], Any]) -> Iterator[Child]:
    made = Child(record, body)
    ended = False
    try:
        yield made
        ended = True
        assert made.end() == 0
    finally:
        if not ended:
            os.kill(made.pid, signal.SIGKILL)
            made.end()


def crash_in_native_code() -> None:
    ctypes.string_at(0)


@pytest.fixture
def record() -> Iterator[PostmortemRecord]:
    made = PostmortemRecord.make()
    assert made is not None
    yield made
    made.close()


# -- a crash -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("die", "signum"),
    [
        (crash_in_native_code, signal.SIGSEGV),
        (os.abort, signal.SIGABRT),
    ],
)
def test_a_crash_leaves_its_python_stack_and_its_signal(
    record: PostmortemRecord, die: Callable[[], None], signum: int
) -> None:
    def the_users_sample(me: Child) -> None:
        die()

    assert Child(record, lambda me: the_users_sample(me)).end() == -signum
    text = record.crash()
    assert text.startswith("Fatal Python error: ")
    assert "The thread that crashed" in text
    assert "in the_users_sample" in text
    assert "Extension modules" not in text


def test_a_stack_that_was_asked_for_is_no_crash_and_a_crash_after_it_is_told(
    record: PostmortemRecord,
) -> None:
    def body(me: Child) -> None:
        me.stuck()
        crash_in_native_code()

    one = Child(record, body)
    one.hear()
    assert "in stuck" in record.stack(one.pid, PATIENCE)
    assert record.crash() == ""
    one.let_go()
    assert one.end() == -signal.SIGSEGV
    assert "in crash_in_native_code" in record.crash()
    assert "in stuck" not in record.crash()


def test_a_fork_of_the_worker_that_crashed_is_not_taken_for_the_worker(
    record: PostmortemRecord,
) -> None:
    def grandchild() -> None:
        os.abort()

    def body(me: Child) -> None:
        pid = os.fork()
        if pid == 0:
            grandchild()
        os.waitpid(pid, 0)
        crash_in_native_code()

    assert Child(record, body).end() == -signal.SIGSEGV
    assert "in crash_in_native_code" in record.crash()
    assert "in grandchild" not in record.crash()


def test_the_users_own_faulthandler_wins(record: PostmortemRecord, tmp_path: Path) -> None:
    own = tmp_path / "own"

    def body(me: Child) -> None:
        faulthandler.enable(own.open("w"))
        crash_in_native_code()

    assert Child(record, body).end() == -signal.SIGSEGV
    assert record.crash() == ""
    assert "in crash_in_native_code" in own.read_text()


# -- dumps as text -----------------------------------------------------------------------------------


def _frame(path: str, function: str, line: int = 1) -> str:
    return f'  File "{path}", line {line} in {function}'


CHILD = str(Path(postmortem.__file__).with_name("child.py"))


def of_dump(text: str) -> str:
    return shortened(text, "The thread that does the tasks")


def test_the_loop_and_what_is_around_it_are_left_out() -> None:
    worker = str(Path(TaskContext.__init__.__code__.co_filename).with_name("worker.py"))
    text = "\n".join(
        [
            "Current thread 0x00ff (most recent call first):",
            _frame("/their/dataset.py", "__getitem__"),
            _frame(worker, "run"),
            _frame(CHILD, "main"),
            _frame("/their/train.py", "<module>"),
        ]
    )
    assert of_dump(text).splitlines()[1:] == [_frame("/their/dataset.py", "__getitem__")]


def test_a_deep_stack_keeps_both_ends() -> None:
    frames = [_frame(f"/a/long/path/to/some/module_{i}.py", f"function_{i}") for i in range(100)]
    text = of_dump("\n".join(["Current thread 0x1 (most recent call first):", *frames]))
    assert len(text) <= MOST
    assert text.splitlines()[1] == frames[-1]
    assert text.splitlines()[-1] == frames[0]
    assert "frames omitted" in text


ALONE = "<Cannot show all threads while the GIL is disabled>"


@pytest.mark.parametrize(
    "heading",
    [
        ["", "Current thread 0x00ff [MainThread] (most recent call first):"],
        pytest.param(["", ALONE, "Stack (most recent call first):"], id="without a GIL"),
    ],
)
def test_what_python_3_14_writes_of_a_crash_is_told_too(heading: list[str]) -> None:
    text = "\n".join(
        [
            "Fatal Python error: Segmentation fault",
            *heading,
            _frame("/their/dataset.py", "__getitem__"),
            _frame(CHILD, "main"),
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


# -- a stack that is asked for -----------------------------------------------------------------------


def test_native_code_that_holds_the_gil_does_not_keep_its_stack_back(
    record: PostmortemRecord,
) -> None:
    def the_users_sample(me: Child) -> None:
        buffer = ctypes.create_string_buffer(1)
        native = ctypes.PyDLL(None)
        os.write(me.tell, b"!")
        holds_the_gil(native, me.told, buffer)

    def holds_the_gil(native: Any, fd: int, buffer: Any) -> None:
        native.read(fd, buffer, 1)  # begun anew after the signal: the worker is not disturbed

    with child(record, the_users_sample) as one:
        one.hear()
        while "in holds_the_gil" not in (text := record.stack(one.pid, PATIENCE)):
            assert "in the_users_sample" in text  # it is about to call it
        one.let_go()


@linux
def test_a_stopped_worker_is_told_and_not_signalled(record: PostmortemRecord) -> None:
    def body(me: Child) -> None:
        me.stuck()

    with child(record, body) as one:
        one.hear()
        os.kill(one.pid, signal.SIGSTOP)
        os.waitpid(one.pid, os.WUNTRACED)
        assert record.stack(one.pid, PATIENCE) == ""
        assert "stopped" in record.why_none
        assert "SIGCONT" in record.why_none
        os.kill(one.pid, signal.SIGCONT)
        os.waitpid(one.pid, os.WCONTINUED)
        assert "in stuck" in record.stack(one.pid, PATIENCE)
        assert record.why_none == ""
        one.let_go()


def test_threads_of_the_users_are_told_and_ours_are_not(record: PostmortemRecord) -> None:
    def body(me: Child) -> None:
        ParentWatch(SimpleNamespace(fileno=lambda: me.told), os.getppid(), sweep=int)
        ready, done = threading.Event(), threading.Event()

        def the_users_thread() -> None:
            ready.set()
            done.wait()

        thread = threading.Thread(target=the_users_thread)
        thread.start()
        ready.wait()
        me.stuck()
        done.set()
        thread.join()

    with child(record, body) as one:
        one.hear()
        text = record.stack(one.pid, PATIENCE)
        assert text.startswith("The thread that does the tasks")
        assert text.index("in stuck") < text.index("Another thread")
        assert "in the_users_thread" in text
        assert "_watch" not in text
        assert "_bootstrap" not in text
        one.let_go()


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
            f"{KILLED} 2 to 5; limit 500.00 B, in use 400.00 B). {LESS}",
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
    found = watch.describe("SIGKILL").splitlines()
    assert [line[: len(start)] for line, start in zip(found, lines, strict=True)] == lines


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
    files = {"proc/self/cgroup": "0::/job\n", **v2("job", 10, used, 0)}
    cause, now = OomWatch(tree(tmp_path, files)).describe("SIGBUS").splitlines()
    assert word in cause
    assert now.endswith(f"/dev/shm {f'{free}.00 KiB' if free else '0.00 B'} of 10.00 KiB free.")
    assert asked == [tmp_path / "dev/shm"]
