"""What a worker process leaves behind: which sample it was at, its stack when it is stuck or crashes."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridloader.backends.fork import Fork
from hybridloader.backends.process import postmortem, stack_dump
from hybridloader.backends.process.postmortem import (
    PostmortemContext,
    PostmortemRecord,
    PostmortemWriter,
    free_signal,
    ours,
)
from hybridloader.backends.spawn import Spawn
from hybridloader.engine.contract import Backend, Crew
from hybridloader.engine.fetcher import Fetcher, FunctionFetcher, TaskContext
from hybridloader.engine.messages import Done, Event, Exited, Ready, Task, WorkerSpec
from hybridloader.fetching.fetch import MapFetch

PATIENCE = 60.0
"""Seconds; never reached when all is well."""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")


@pytest.fixture
def record() -> Iterator[PostmortemRecord]:
    made = PostmortemRecord.make()
    assert made is not None
    yield made
    made.close()


class Child:
    """A forked process with the worker's side of a record, and a line each way."""

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


# -- numbers -----------------------------------------------------------------------------------------


def test_a_new_record_knows_nothing(record: PostmortemRecord) -> None:
    assert (record.at, record.task, record.crash()) == (None, None, "")


def test_what_the_worker_was_at_outlives_it(record: PostmortemRecord) -> None:
    def body(me: Child) -> None:
        me.side.begin(7)
        flag = me.side.context()
        flag.at = 2
        flag.at = 3
        os.kill(os.getpid(), signal.SIGKILL)

    assert Child(record, body).end() == -signal.SIGKILL
    assert (record.task, record.at) == (7, 3)


def test_a_task_begins_without_a_sample_and_ends_without_either(record: PostmortemRecord) -> None:
    seen: list[tuple[int | None, int | None]] = []

    def body(me: Child) -> None:
        flag = me.side.context()
        steps: tuple[Callable[[], None], ...] = (
            lambda: me.side.begin(0),
            lambda: setattr(flag, "at", 5),
            me.side.end,
            lambda: me.side.begin(1),
        )
        for step in steps:
            step()
            me.stuck()

    with child(record, body) as one:
        for _ in range(4):
            one.hear()
            seen.append((record.task, record.at))
            one.let_go()
    assert seen == [(0, None), (0, 5), (None, 5), (1, None)]


def test_the_flag_is_one_that_fetchers_know_and_starts_at_no_sample() -> None:
    cell = ctypes.c_int64(5)
    flag = PostmortemContext(cell)
    assert isinstance(flag, TaskContext)
    assert (flag.cancelled, flag.tracked, TaskContext().tracked) == (False, True, False)
    assert (flag.at, cell.value) == (-1, -1)
    flag.at = 4
    assert (flag.at, cell.value) == (4, 4)


def test_closing_twice_is_closing_once_and_nothing_is_known_after(record: PostmortemRecord) -> None:
    fd = record.fd
    assert fd in ours
    record.close()
    other = os.dup(0)  # has the number now, most likely; a second close would take it away
    record.close()
    os.fstat(other)
    os.close(other)
    assert fd not in ours
    assert (record.at, record.task, record.crash(), record.stack(os.getpid())) == (
        None,
        None,
        "",
        "",
    )
    assert record.why_none


def test_there_is_no_record_where_no_file_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(postmortem, "_nameless_file", refuse)
    assert PostmortemRecord.make() is None
    monkeypatch.undo()
    monkeypatch.delattr(faulthandler, "register")
    assert PostmortemRecord.make() is None


def test_a_descriptor_that_is_no_record_leaves_the_worker_without(record: PostmortemRecord) -> None:
    assert PostmortemWriter.open(10_000_000) is None
    read, write = os.pipe()
    was = faulthandler.is_enabled()
    assert PostmortemWriter.open(read) is None  # can't be mapped
    assert faulthandler.is_enabled() == was
    with pytest.raises(OSError):  # and was closed
        os.fstat(read)
    os.close(write)


def test_where_there_is_no_memfd_a_file_without_a_name_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
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


def _crash_in_native_code() -> None:
    ctypes.string_at(0)


def _raise_signal(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("die", "signum"),
    [
        (_crash_in_native_code, signal.SIGSEGV),
        (os.abort, signal.SIGABRT),
        (_raise_signal(signal.SIGBUS), signal.SIGBUS),
        (_raise_signal(signal.SIGFPE), signal.SIGFPE),
        (_raise_signal(signal.SIGILL), signal.SIGILL),
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


def test_a_death_without_a_crash_leaves_no_stack(record: PostmortemRecord) -> None:
    assert Child(record, lambda me: os.kill(os.getpid(), signal.SIGKILL)).end() == -signal.SIGKILL
    assert record.crash() == ""


def test_a_stack_that_was_asked_for_is_no_crash_and_a_crash_after_it_is_told(
    record: PostmortemRecord,
) -> None:
    def body(me: Child) -> None:
        me.stuck()
        _crash_in_native_code()

    one = Child(record, body)
    one.hear()
    assert "in stuck" in record.stack(one.pid, PATIENCE)
    assert record.crash() == ""
    one.let_go()
    assert one.end() == -signal.SIGSEGV
    assert "in _crash_in_native_code" in record.crash()
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
        _crash_in_native_code()

    assert Child(record, body).end() == -signal.SIGSEGV
    assert "in _crash_in_native_code" in record.crash()
    assert "in grandchild" not in record.crash()


def test_the_users_own_faulthandler_wins(record: PostmortemRecord, tmp_path: Path) -> None:
    own = tmp_path / "own"

    def body(me: Child) -> None:
        faulthandler.enable(own.open("w"))
        _crash_in_native_code()

    assert Child(record, body).end() == -signal.SIGSEGV
    assert record.crash() == ""
    assert "in _crash_in_native_code" in own.read_text()


# -- a stack that is asked for -----------------------------------------------------------------------


def test_a_worker_that_waits_for_ever_tells_where_and_goes_on(record: PostmortemRecord) -> None:
    def the_users_sample(me: Child) -> None:
        me.stuck()

    with child(record, the_users_sample) as one:
        one.hear()
        for _ in range(3):
            text = record.stack(one.pid, PATIENCE)
            assert text.startswith("The thread that does the tasks")
            assert text.count("in the_users_sample") == 1
            assert record.why_none == ""
        one.let_go()


def test_a_second_stack_does_not_have_the_first(record: PostmortemRecord) -> None:
    def first(me: Child) -> None:
        me.stuck()

    def second(me: Child) -> None:
        me.stuck()

    with child(record, lambda me: (first(me), second(me))) as one:
        for name, other in (("first", "second"), ("second", "first")):
            one.hear()
            text = record.stack(one.pid, PATIENCE)
            assert f"in {name}" in text
            assert f"in {other}" not in text
            one.let_go()


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


def test_a_loop_without_end_tells_where(record: PostmortemRecord) -> None:
    def the_users_sample(me: Child) -> None:
        os.write(me.tell, b"!")
        while True:
            pass

    one = Child(record, the_users_sample)
    one.hear()
    try:
        assert "in the_users_sample" in record.stack(one.pid, PATIENCE)
    finally:
        os.kill(one.pid, signal.SIGKILL)
        assert one.end() == -signal.SIGKILL


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
def test_a_worker_that_has_ended_is_told(record: PostmortemRecord) -> None:
    one = Child(record, lambda me: None)
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    assert record.stack(one.pid, PATIENCE) == ""
    assert "ended" in record.why_none
    assert one.end() == 0
    assert record.stack(one.pid, PATIENCE) == ""
    assert "ended" in record.why_none


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
    from hybridloader.backends.process.parent_watch import ParentWatch

    class Channel:
        def __init__(self, fd: int) -> None:
            self.fileno = lambda: fd

    def body(me: Child) -> None:
        import threading

        ParentWatch(Channel(me.told), os.getppid(), sweep=int)
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
    from hybridloader.backends.process.parent_watch import ParentWatch

    class Channel:
        def __init__(self, fd: int) -> None:
            self.fileno = lambda: fd

    def body(me: Child) -> None:
        line, _ = os.pipe()  # which nobody hangs up
        life = ParentWatch(Channel(line), os.getppid(), sweep=int)
        flags = [me.side.context(), me.side.context()]
        life.change(flags[0])
        assert life.context is flags[0]
        assert not flags[0].cancelled
        flags[0].cancelled = True
        life.change(flags[1])
        assert flags[1].cancelled

    assert Child(record, body).end() == 0


FRESH = """
    import os, sys
    from hybridloader.backends.process.postmortem import PostmortemWriter

    def the_users_sample():
        print("!", flush=True)
        sys.stdin.read(1)

    side = PostmortemWriter.open(int(sys.argv[1]))
    assert not os.get_inheritable(side.fd)
    side.begin(4)
    the_users_sample()
    print(sorted({"torch", "numpy"} & set(sys.modules)))
"""


def test_a_fresh_process_with_a_duplicate_does_the_same(record: PostmortemRecord) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FRESH), str(record.fd)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(record.fd,)
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(1) == "!"
        assert "in the_users_sample" in record.stack(process.pid, PATIENCE)
        assert record.task == 4
        assert process.communicate("!")[0].strip() == "[]"
    assert process.returncode == 0


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


def test_without_proc_pythons_own_handlers_are_heeded(
    record: PostmortemRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postmortem, "_status_of", lambda pid: None)

    def body(me: Child) -> None:
        first = record._numbers()[0]
        assert first > 0
        signal.signal(first, lambda *_: None)
        signal.signal(first + 1, signal.SIG_IGN)
        assert free_signal() == first + 2

    assert Child(record, body).end() == 0


def test_where_no_signal_is_free_the_rest_works(
    record: PostmortemRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postmortem, "free_signal", lambda: None)

    def body(me: Child) -> None:
        me.side.begin(1)
        me.stuck()
        _crash_in_native_code()

    one = Child(record, body)
    one.hear()
    assert (record.task, record.stack(one.pid, PATIENCE)) == (1, "")
    assert record.why_none
    one.let_go()
    assert one.end() == -signal.SIGSEGV
    assert "in _crash_in_native_code" in record.crash()


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
        numbers = postmortem._NUMBERS.pack(38, 99, 1, -1, -1)
        self.record = PostmortemRecord(
            _with_numbers(made, numbers),
            clock=lambda: self.now,
            sleep=self._sleep,
            kill=self._kill,
            status=lambda pid: self._status(),
        )

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
    import mmap

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
    assert text.splitlines()[1:] == [line for line in expected if line.strip()]
    assert kernel.now <= sum(gap for gap, _ in pieces) + 0.05
    kernel.record.close()


def test_patience_ends() -> None:
    kernel = Kernel([], state="D (disk sleep)")
    assert kernel.record.stack(99, 0.5) == ""
    assert 0.5 <= kernel.now < 0.52
    assert "uninterruptible" in kernel.record.why_none
    assert kernel.sent == [38]
    kernel.record.close()


@pytest.mark.parametrize("state", ["T (stopped)", "t (tracing stop)", "Z (zombie)", "X (dead)"])
def test_what_can_not_answer_is_neither_asked_nor_waited_for(state: str) -> None:
    kernel = Kernel([], state=state)
    assert kernel.record.stack(99, 0.5) == ""
    assert (kernel.now, kernel.sent) == (0.0, [])
    assert f"state {state[0]}" in kernel.record.why_none
    kernel.record.close()


def test_a_worker_that_has_yet_to_answer_is_not_asked_again() -> None:
    kernel = Kernel([(0.0, "x")])
    kernel.pending = True
    assert kernel.record.stack(99, 0.1) == ""
    assert kernel.sent == []
    kernel.record.close()


@pytest.mark.parametrize(
    ("error", "word"), [(ProcessLookupError(), "ended"), (PermissionError(1, "not you"), "not you")]
)
def test_a_signal_that_can_not_be_sent_is_told(error: OSError, word: str) -> None:
    def refuse(pid: int, signum: int) -> None:
        raise error

    kernel = Kernel([])
    kernel.record._kill = refuse
    assert kernel.record.stack(99, 0.1) == ""
    assert word in kernel.record.why_none
    kernel.record.close()


def test_without_proc_it_is_asked_and_believed_when_it_is_silent() -> None:
    kernel = Kernel([(0.01, "Thread 0x1 (most recent call first):\n  frame\n")])
    kernel.record._status = lambda pid: None
    assert "frame" in kernel.record.stack(99, 0.5)
    assert 0.03 <= kernel.now < 0.06
    kernel.record.close()


# -- the text ----------------------------------------------------------------------------------------


def _frame(path: str, function: str, line: int = 1) -> str:
    return f'  File "{path}", line {line} in {function}'


CHILD = str(Path(postmortem.__file__).with_name("child.py"))


def test_the_loop_and_what_is_around_it_are_left_out() -> None:
    worker = str(Path(TaskContext.__init__.__code__.co_filename).with_name("worker.py"))
    text = "\n".join(
        [
            "Thread 0x00ff (most recent call first):",
            _frame("/their/dataset.py", "__getitem__"),
            _frame(worker, "run"),
            _frame(CHILD, "main"),
            _frame("/their/train.py", "<module>"),
        ]
    )
    assert stack_dump.of_dump(text, 255).splitlines()[1:] == [
        _frame("/their/dataset.py", "__getitem__")
    ]


def test_a_worker_that_only_waits_for_a_task_shows_that() -> None:
    text = "\n".join(
        [
            "Current thread 0x00ff (most recent call first):",
            _frame(CHILD, "get"),
            _frame(CHILD, "main"),
        ]
    )
    assert stack_dump.of_dump(text, 255).splitlines()[1:] == [_frame(CHILD, "get")]


def test_a_deep_stack_keeps_both_ends() -> None:
    frames = [_frame(f"/a/long/path/to/some/module_{i}.py", f"function_{i}") for i in range(100)]
    text = stack_dump.of_dump("\n".join(["Thread 0x1 (most recent call first):", *frames]), 1)
    assert len(text) <= stack_dump.MOST
    assert "function_0" in text
    assert "function_99" in text
    assert "frames left out" in text


def test_a_thread_without_python_frames_is_left_out() -> None:
    lines = ["Thread 0x2 (most recent call first):", "  <no Python frame>"]
    lines += ["Thread 0x1 (most recent call first):", _frame("/mine.py", "mine")]
    assert stack_dump.of_dump("\n".join(lines), 1).splitlines()[1:] == [_frame("/mine.py", "mine")]


@pytest.mark.parametrize("noise", ["y" * 10_000, "line\n" * 2_000])
def test_what_is_no_stack_is_cut_to_size(noise: str) -> None:
    text = f"Fatal Python error: {noise}\nCurrent thread 0x1 (most recent call first):\n  frame"
    told = stack_dump.of_crash(text)
    assert len(told) <= 1_100
    assert told.endswith("  frame")


def test_a_crash_is_found_behind_many_stacks(record: PostmortemRecord) -> None:
    for _ in range(40):
        os.write(record.fd, b"Thread 0x1 (most recent call first):\n" + b"  x\n" * 2_500)
    os.write(record.fd, b"Fatal Python error: Aborted\n")
    assert record.crash() == "Fatal Python error: Aborted"


def test_many_threads_do_not_push_out_the_one_that_matters() -> None:
    blocks = []
    for ident in range(2, 100):
        blocks += [f"Thread 0x{ident:x} (most recent call first):", _frame("/x" * 40, f"f{ident}")]
    blocks += ["Thread 0x1 (most recent call first):", _frame("/mine.py", "mine")]
    text = stack_dump.of_dump("\n".join(blocks), 1)
    assert text.splitlines()[1] == _frame("/mine.py", "mine")
    assert len(text) <= stack_dump.MOST
    assert "more threads left out" in text


_LINE = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "Fatal Python error: Segmentation fault",
            "Thread 0x0001 (most recent call first):",
            "Current thread 0x0002 [name] (most recent call first):",
            "Current thread's C stack trace (most recent call first):",
            "  <no Python frame>",
            "  ...",
            _frame(CHILD, "main"),
            _frame(CHILD, "_watch"),
            _frame("/a/" + "very/" * 60 + "long.py", "f"),
        ]
    ),
)


@given(st.lists(_LINE, max_size=120), st.integers(0, 3))
def test_any_text_is_cut_to_size(lines: list[str], home: int) -> None:
    text = "\n".join(lines)
    assert len(stack_dump.of_dump(text, home)) <= stack_dump.MOST
    crash = stack_dump.of_crash(text)
    assert len(crash) <= stack_dump.MOST
    assert bool(crash) == ("Fatal Python error: " in text)


def test_what_python_3_14_writes_of_a_crash_is_told_too() -> None:
    text = "\n".join(
        [
            "Fatal Python error: Segmentation fault",
            "",
            "Current thread 0x00ff [MainThread] (most recent call first):",
            _frame("/their/dataset.py", "__getitem__"),
            _frame(CHILD, "main"),
            "",
            "Current thread's C stack trace (most recent call first):",
            '  Binary file "/lib/libc.so.6", at +0x1234',
            "",
            "Extension modules: numpy (total: 1)",
        ]
    )
    assert stack_dump.of_crash(text).splitlines() == [
        "Fatal Python error: Segmentation fault",
        "The thread that crashed (most recent call first):",
        _frame("/their/dataset.py", "__getitem__"),
        "Current thread's C stack trace (most recent call first):",
        '  Binary file "/lib/libc.so.6", at +0x1234',
    ]


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


@pytest.mark.parametrize("backend", [Fork(), Spawn()], ids=lambda backend: backend.name)
def test_a_crew_tells_at_which_sample_its_worker_crashed_and_where(
    backend: Backend, tmp_path: Path
) -> None:
    with crew_of(backend, "") as crew:
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
        assert text.rstrip().splitlines()[-1].endswith("in fetch")  # and nothing of ours around it
        crew.kill(0)
        (death,) = (e for e in events_until(crew, Exited) if isinstance(e, Exited))
    assert (death.task, death.at) == (3, None)


def test_a_record_that_is_closed_while_its_worker_is_asked_says_so() -> None:
    """The stage that is pulled on another thread may end at any point."""
    kernel = Kernel([])
    made = kernel.record
    made._sleep = lambda seconds: made.close()
    assert made.stack(99) == ""
    assert "meanwhile" in made.why_none
