"""Stack dumps as text: the user's frames first, and cut to size."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.platforms import posix

from hybridloader.backends.process import postmortem
from hybridloader.backends.process.postmortem import MOST, PostmortemRecord, shortened
from hybridloader.engine.messages import TaskContext

# -- the text ----------------------------------------------------------------------------------------


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


def test_the_main_thread_comes_first_in_a_dump_by_another_thread() -> None:
    text = "\n".join(
        [
            "Thread 0x03 (most recent call first):",
            _frame("/their/reader.py", "read"),
            "Current thread 0x02 (most recent call first):",
            _frame(threading.Thread.run.__code__.co_filename, "run"),
            "Thread 0x01 (most recent call first):",
            _frame("/their/dataset.py", "__getitem__"),
        ]
    )
    assert of_dump(postmortem._main_thread_as_current(text)).splitlines() == [
        "The thread that does the tasks (most recent call last):",
        _frame("/their/dataset.py", "__getitem__"),
        "Another thread (most recent call last):",
        _frame("/their/reader.py", "read"),
    ]
    assert postmortem._main_thread_as_current("") == ""


def test_a_worker_that_only_waits_for_a_task_shows_that() -> None:
    text = "\n".join(
        [
            "Current thread 0x00ff (most recent call first):",
            _frame(CHILD, "get"),
            _frame(CHILD, "main"),
        ]
    )
    assert of_dump(text).splitlines()[1:] == [_frame(CHILD, "get")]


def test_a_deep_stack_keeps_both_ends() -> None:
    frames = [_frame(f"/a/long/path/to/some/module_{i}.py", f"function_{i}") for i in range(100)]
    text = of_dump("\n".join(["Current thread 0x1 (most recent call first):", *frames]))
    assert len(text) <= MOST
    assert text.splitlines()[1] == frames[-1]
    assert text.splitlines()[-1] == frames[0]
    assert "frames omitted" in text


def test_the_frame_that_a_stack_ends_in_is_kept_at_any_length() -> None:
    lines = ["x" * 200] * 10
    frames = [_frame("/x" * 200, f"f{i}") for i in range(100)]
    dump = "\n".join([*lines, "Current thread 0x1 (most recent call first):", *frames])
    assert of_dump(dump).splitlines()[-1] == frames[0][:160]


def test_a_thread_without_python_frames_is_left_out() -> None:
    lines = ["Thread 0x2 (most recent call first):", "  <no Python frame>"]
    lines += ["Current thread 0x1 (most recent call first):", _frame("/mine.py", "mine")]
    assert of_dump("\n".join(lines)).splitlines()[1:] == [_frame("/mine.py", "mine")]


@pytest.mark.parametrize("noise", ["y" * 10_000, "line\n" * 2_000])
def test_what_is_no_stack_is_cut_to_size(noise: str) -> None:
    text = f"Fatal Python error: {noise}\nCurrent thread 0x1 (most recent call first):\n  frame"
    told = shortened(text, "The thread that crashed")
    assert len(told) <= 1_100
    assert told.endswith("  frame")


@posix
def test_a_crash_is_found_behind_many_stacks(record: PostmortemRecord) -> None:
    for _ in range(40):
        os.write(record.fd, b"Thread 0x1 (most recent call first):\n" + b"  x\n" * 2_500)
    os.write(record.fd, b"Fatal Python error: Aborted\n")
    assert record.crash() == "Fatal Python error: Aborted"


def test_many_threads_do_not_push_out_the_one_that_matters() -> None:
    blocks = []
    for ident in range(2, 100):
        blocks += [f"Thread 0x{ident:x} (most recent call first):", _frame("/x" * 40, f"f{ident}")]
    blocks += ["Current thread 0x1 (most recent call first):", _frame("/mine.py", "mine")]
    text = of_dump("\n".join(blocks))
    assert text.splitlines()[1] == _frame("/mine.py", "mine")
    assert len(text) <= MOST


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
