"""Stack dumps of living workers: asked for by a signal, and read whole or given up."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.platforms import posix
from support.postmortem import PATIENCE, Child, child, crash_in_native_code, linux

from hybridloader.backends.process import postmortem
from hybridloader.backends.process.postmortem import PostmortemRecord, PostmortemWriter, free_signal

pytestmark = posix


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
    from hybridloader.backends.process.child import ParentWatch

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
    from hybridloader.backends.process.child import ParentWatch

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
    assert text.splitlines()[:0:-1] == [line for line in expected if line.strip()]
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


def test_a_record_that_is_closed_while_its_worker_is_asked_says_so() -> None:
    """The stage that is pulled on another thread may end at any point."""
    kernel = Kernel([])
    made = kernel.record
    made._sleep = lambda seconds: made.close()
    assert made.stack(99) == ""
    assert "meanwhile" in made.why_none
