"""What is known of a worker after its death: its sample, its stack, and the memory of the machine.

All of `hybridloader.backends.process.postmortem`: records in forked processes and in crews, stack
dumps as text and on request, and reports of memory from trees of files made up for them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.platforms import posix

from hybridloader import Fork, Spawn
from hybridloader._support import system
from hybridloader.backends.process import postmortem
from hybridloader.backends.process.child import ParentWatch
from hybridloader.backends.process.postmortem import (
    MOST,
    OomWatch,
    PostmortemRecord,
    PostmortemWriter,
    free_signal,
    shortened,
)
from hybridloader.engine import (
    Backend,
    Crew,
    Done,
    Event,
    Exited,
    Fetcher,
    Ready,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.engine.messages import FunctionFetcher
from hybridloader.fetching.readers import MapFetch

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


# -- numbers -----------------------------------------------------------------------------------------


def test_where_there_is_no_memfd_a_file_without_a_name_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(system, "MEMFD", False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = PostmortemRecord.make()
    assert made is not None
    assert not list(tmp_path.iterdir())

    def body(me: Child) -> None:
        me.side.begin(3)
        ctypes.string_at(0)

    assert Child(made, body).end() == -signal.SIGSEGV
    assert made.task == 3
    assert "in body" in made.crash()
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


# -- in a crew ---------------------------------------------------------------------------------------


class Trouble:
    """Samples some of which crash or hang."""

    def __init__(self, fifo: str) -> None:
        self.fifo = fifo

    def __getitem__(self, index: int) -> int:
        if index == 1:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 2)
            ctypes.string_at(0)
        if index == 2:
            self.hang()
        return index

    def hang(self) -> None:
        with open(self.fifo, "wb", buffering=0) as line:
            line.write(b"!")
        with open(self.fifo, "rb") as line:  # blocks: nobody writes
            line.read()


@dataclass(frozen=True)
class Noting(MapFetch):
    """One that says which sample it is at, as fetchers do that are watched."""

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        def fetch(indices: list[int]) -> list[int]:
            samples = []
            for number, index in enumerate(indices):
                context.at = number
                samples.append(self.dataset[index])
            return samples

        return FunctionFetcher(fetch)


@contextmanager
def crew_of(backend: Backend, fifo: str, *, tracked: bool = True) -> Iterator[Crew]:
    crew = backend.open()
    try:
        fetch = Noting(Trouble(fifo), list, batched=True)
        crew.start(0, WorkerSpec("stage", 1, fetch, tracked=tracked))
        while not any(isinstance(event, Ready) for event in crew.wait(PATIENCE)):
            pass
        yield crew
    finally:
        crew.close()


def events_until(crew: Crew, kind: type) -> list[Event]:
    found: list[Event] = []
    while not any(isinstance(event, kind) for event in found):
        found += crew.wait(PATIENCE)
    return found


def test_a_crew_tells_at_which_sample_its_worker_crashed_and_where() -> None:
    with crew_of(Fork(), "") as crew:
        crew.send(0, Task(6, [0, 0]))
        (done,) = (e for e in events_until(crew, Done) if isinstance(e, Done))
        done.payload.discard()
        crew.send(0, Task(7, [0, 0, 1, 0]))
        (death,) = (e for e in events_until(crew, Exited) if isinstance(e, Exited))
    assert "SIGSEGV" in (death.cause or "")
    assert (death.task, death.at) == (7, 2)
    assert "in __getitem__" in death.evidence
    assert "in main" not in death.evidence


def test_a_worker_that_dies_between_two_tasks_was_at_none() -> None:
    with crew_of(Fork(), "") as crew:
        crew.send(0, Task(6, [0, 0]))
        (done,) = (e for e in events_until(crew, Done) if isinstance(e, Done))
        done.payload.discard()
        while "in get" not in crew.stack(0):  # it has yet to come back for the next
            pass
        crew.kill(0)
        (death,) = (e for e in events_until(crew, Exited) if isinstance(e, Exited))
    assert (death.task, death.at) == (None, -1)


@pytest.mark.parametrize("backend", [Fork(), Spawn()], ids=lambda backend: backend.name)
def test_a_crew_tells_where_its_worker_hangs(backend: Backend, tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with crew_of(backend, fifo, tracked=False) as crew:
        crew.send(0, Task(3, [2]))
        crew.flush()
        with open(fifo, "rb", buffering=0) as line:
            assert line.read(1) == b"!"
        text = crew.stack(0)
        assert "in hang" in text
        assert text.splitlines()[1].endswith("in fetch")  # and nothing of ours around it
        crew.kill(0)
        (death,) = (e for e in events_until(crew, Exited) if isinstance(e, Exited))
    assert (death.task, death.at) == (3, None)


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


_LINE = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "Fatal Python error: Segmentation fault",
            "Thread 0x0001 (most recent call first):",
            "Current thread 0x0002 [name] (most recent call first):",
            "Current thread's C stack trace (most recent call first):",
            "Stack (most recent call first):",
            "  <no Python frame>",
            "  ...",
            _frame(CHILD, "main"),
            _frame(CHILD, "_watch"),
            _frame("/a/" + "very/" * 60 + "long.py", "f"),
        ]
    ),
)


@given(st.lists(_LINE, max_size=120))
def test_any_text_is_cut_to_size(lines: list[str]) -> None:
    assert len(of_dump("\n".join(lines))) <= MOST


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


@linux
def test_a_worker_that_blocks_the_signal_is_told_to(record: PostmortemRecord) -> None:
    def body(me: Child) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        me.stuck()

    with child(record, body) as one:
        one.hear()
        assert record.stack(one.pid, 0.05) == ""
        assert "blocked" in record.why_none
        one.let_go()


def test_only_the_process_whose_record_it_is_gets_the_signal(record: PostmortemRecord) -> None:
    sent: list[tuple[int, int]] = []
    record._kill = lambda *what: sent.append(what)
    assert record.stack(os.getpid(), PATIENCE) == ""  # nobody has registered
    assert "not yet" in record.why_none
    with child(record, lambda me: me.stuck()) as one:
        one.hear()
        assert record.stack(os.getpid(), PATIENCE) == ""
        assert "not yet" in record.why_none
        one.let_go()
    assert sent == []


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


def test_a_flag_that_is_up_stays_up_when_another_takes_its_place(record: PostmortemRecord) -> None:
    def body(me: Child) -> None:
        line, _ = os.pipe()  # which nobody hangs up
        life = ParentWatch(SimpleNamespace(fileno=lambda: line), os.getppid(), sweep=int)
        flags = [me.side.context(), me.side.context()]
        life.change(flags[0])
        assert life.context is flags[0]
        assert not flags[0].cancelled
        flags[0].cancelled = True
        life.change(flags[1])
        assert flags[1].cancelled

    assert Child(record, body).end() == 0


# -- which signal ------------------------------------------------------------------------------------


@linux
def test_the_signal_is_one_that_nobody_uses(record: PostmortemRecord) -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(n) for n in sorted(signal.valid_signals())]

    def body(me: Child) -> None:
        first = signal.SIGRTMIN + 4
        assert record._numbers()[0] == first
        assert free_signal() == first + 1  # as faulthandler has taken the first
        signal.signal(first + 1, lambda *_: None)
        signal.signal(first + 2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {first + 3})
        before = handlers()
        assert free_signal() == first + 4
        again = PostmortemWriter.open(os.dup(record.fd))
        assert again is not None
        assert record._numbers()[0] == first + 4
        assert handlers() == before
        for signum in range(first + 5, signal.SIGRTMAX + 1):
            signal.signal(signum, lambda *_: None)
        assert free_signal() is None

    assert Child(record, body).end() == 0


def test_where_no_signal_is_free_the_rest_works(
    record: PostmortemRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postmortem, "free_signal", lambda: None)

    def body(me: Child) -> None:
        me.side.begin(1)
        me.stuck()
        crash_in_native_code()

    one = Child(record, body)
    one.hear()
    assert (record.task, record.stack(one.pid, PATIENCE)) == (1, "")
    assert record.why_none
    one.let_go()
    assert one.end() == -signal.SIGSEGV
    assert "in crash_in_native_code" in record.crash()


# -- the parent's patience, on a clock of its own ----------------------------------------------------


class Kernel:
    """A worker that answers as told: pieces of text, each so many seconds after the one before."""

    def __init__(self, pieces: list[tuple[float, str]], state: str = "S (sleeping)") -> None:
        self.now, self.sent, self.state = 0.0, [], state  # type: float, list[int], str
        self.pending = False
        self._pieces = pieces
        self._due: list[tuple[float, str]] = []
        made = PostmortemRecord.make()
        assert made is not None
        numbers = postmortem._NUMBERS.pack(38, 99, -1, -1)
        self.record: Any = PostmortemRecord(_with_numbers(made, numbers))
        self.record._clock, self.record._sleep = lambda: self.now, self._sleep
        self.record._kill, self.record._status = self._kill, lambda pid: self._status()

    def _kill(self, pid: int, signum: int) -> None:
        assert (pid, signum) == (99, 38)
        self.sent.append(signum)
        at = self.now
        for gap, text in self._pieces:
            at += gap
            self._due.append((at, text))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        while self._due and self._due[0][0] <= self.now:
            os.write(self.record.fd, self._due.pop(0)[1].encode())

    def _status(self) -> dict[str, str]:
        handling = self._due and self.now > 0
        mask = f"{1 << 37 if handling else 0:016x}"
        return {"State": self.state, "SigBlk": mask, "ShdPnd": f"{self.pending << 37:016x}"}


def _with_numbers(made: PostmortemRecord, numbers: bytes) -> int:
    """A duplicate of the file of `made`, with these numbers; `made` is closed."""
    fd = os.dup(made.fd)
    made.close()
    with mmap.mmap(fd, 64) as memory:
        memory[: len(numbers)] = numbers
    return fd


@given(
    st.lists(
        st.tuples(st.floats(0, 0.1), st.sampled_from(["a", "b\n", "ccc"])), min_size=1, max_size=8
    )
)
def test_a_dump_is_read_whole_however_slowly_it_comes(pieces: list[tuple[float, str]]) -> None:
    heading = "Thread 0x0001 (most recent call first):\n  "
    kernel = Kernel([(0.0, heading), *pieces])
    text = kernel.record.stack(99, 2.0)
    expected = (heading + "".join(text for _, text in pieces)).splitlines()[1:]
    assert text.splitlines()[:0:-1] == [line for line in expected if line.strip()]
    assert kernel.now <= sum(gap for gap, _ in pieces) + 0.05
    kernel.record.close()


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
    for name in ("SIGKILL", "SIGBUS"):
        assert len(OomWatch(tmp_path).describe(name).splitlines()) <= 2


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
