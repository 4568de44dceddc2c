"""Watch: the table of all loaders on a terminal, and lines where there is none."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.recordings import recording, stage
from support.terminal import Terminal

from hybridloader import DataLoader, Pipeline
from hybridloader.observe import Stats, watching
from hybridloader.observe.stats import stats_of
from hybridloader.observe.watching import Lines, LiveTable, Watch, WatchedRow, running_watch, watch

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}
ROW = WatchedRow("DataLoader", "12.5/s", "74%", "sampler 0%, DataLoader 98% <", "It waits.", 100)
ROOT = Path(__file__).parents[2]


class Shown:
    """Display that notes what it is given."""

    every = 1000.0

    def __init__(self) -> None:
        self.ended: list[WatchedRow] = []
        self.shows = 0
        self.came = threading.Event()

    def begin(self) -> None: ...

    def show(self, rows: Sequence[WatchedRow]) -> None:
        self.shows += 1
        self.came.set()

    def end(self, rows: Sequence[WatchedRow]) -> None:
        self.ended = list(rows)


# -- what is watched ---------------------------------------------------------------------------------


def test_all_loaders_and_pipelines_are_seen() -> None:
    display = Shown()
    first = DataLoader(range(8), 2, **THREADS)  # type: ignore[arg-type]
    with Watch(display) as running:
        assert running_watch() is running
        for _ in range(2):
            list(first)
        list(DataLoader(range(6), 2))  # type: ignore[arg-type]
        list(Pipeline.from_iterable(range(5)).map(abs, **THREADS))
        with Pipeline.from_iterable(range(9)).epochs(2) as epochs:
            for run in epochs:
                list(run)
    assert running_watch() is None
    rows = {row.name: row for row in display.ended}
    assert {name: row.items for name, row in rows.items()} == {
        "DataLoader": 4,
        "DataLoader 2": 3,
        "Pipeline": 5,
        "Pipeline 2": 18,
    }
    assert "DataLoader" in rows["DataLoader"].stages
    assert "your loop" not in rows["DataLoader"].stages
    assert rows["DataLoader"].rate.endswith("/s")
    assert rows["Pipeline"].verdict
    assert first.stats().items == 4, "it observes, so stats() can be asked for"
    list(first)
    with pytest.raises(RuntimeError, match="observe=True"):
        first.stats()


def test_nobody_is_held_and_only_the_latest_are_shown() -> None:
    display = Shown()
    with Watch(display) as running:
        for number in range(watching.SHOWN + 3):
            running.see("it", ("it", number), lambda: None)  # a loader has a number, too
        assert not running.rows(), "gone before they were looked at"
        for _ in DataLoader(range(8), 2, **THREADS):  # type: ignore[arg-type]
            break
    assert [row.name for row in display.ended] == ["DataLoader"]


def test_a_loader_that_is_used_again_stays() -> None:
    """Each epoch has a validation loader of its own."""
    with Watch(Shown()) as running:
        for epoch in range(2 * watching.SHOWN):
            running.see("train", 0, lambda: stats_of(recording(stage())))
            running.see("validation", 1 + epoch, lambda: None)
            assert [row.name for row in running.rows()] == ["train"]


def test_statistics_that_can_not_be_had_at_a_moment_are_asked_for_again() -> None:
    answers = [stats_of(recording(stage())), RuntimeError("it changed during iteration")]

    def stats() -> Stats:
        found = answers.pop()
        if isinstance(found, Exception):
            raise found
        return found

    with Watch(Shown()) as running:
        running.see("it", 0, stats)
        assert running.rows() == []
        assert [row.name for row in running.rows()] == ["it"]
        answers.append(stats_of(recording(stage())))


def test_a_terminal_that_is_gone_at_the_end_does_not_hide_an_error() -> None:
    class Gone(Shown):
        def end(self, rows: Sequence[WatchedRow]) -> None:
            raise BrokenPipeError

    with pytest.raises(KeyError), Watch(Gone()):
        raise KeyError
    with pytest.raises(BrokenPipeError), Watch(Gone()):
        pass


def test_a_thread_shows_them_meanwhile() -> None:
    display = Shown()
    display.every = 0.001
    with Watch(display):
        assert display.came.wait(60)
    shows = display.shows
    assert shows
    assert not any(thread.name == "hybridloader-watch" for thread in threading.enumerate())


def test_a_terminal_that_is_gone_ends_the_showing_alone() -> None:
    class Gone(Shown):
        every = 0.001

        def show(self, rows: Sequence[WatchedRow]) -> None:
            super().show(rows)
            raise BrokenPipeError

    display = Gone()
    with Watch(display):
        assert display.came.wait(60)
        assert list(DataLoader(range(3))) != []  # type: ignore[arg-type]
    assert display.shows == 1


# -- the terminal ------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_terminal(stdout: io.StringIO | None = None) -> Iterator[Terminal]:
    """Have a terminal of 12 lines for both streams of the script."""
    terminal = Terminal(12)
    with (
        contextlib.redirect_stdout(terminal if stdout is None else stdout),
        contextlib.redirect_stderr(terminal),
    ):
        yield terminal


def live(terminal: Terminal, size: tuple[int, int] = (100, 12)) -> LiveTable:
    table = LiveTable(terminal, size=lambda: size)
    table.begin()
    return table


def script() -> Iterator[None]:
    """Lines, parts of lines, and progress bars."""
    for number in range(20):
        print(f"line {number}")
        yield
        print("part", end=" ")
        yield
        print("and its end", flush=True)
        print(f"\r{number:3} %|###", end="", file=sys.stderr)
        yield
        print(f"\r{number:3} %|##########", end="", file=sys.stderr)
        yield
        sys.stdout.writelines(["\n", "two ", "words\n"])


def test_what_a_script_writes_stays_as_it_is() -> None:
    with on_terminal() as wanted:
        for _ in script():
            pass
    with on_terminal() as terminal:
        table, seen = live(terminal), 0
        for _ in script():
            table.show([ROW])
            seen += "74%" in terminal.text
        table.end([])
        assert sys.stdout is sys.stderr is terminal
    assert seen == 80, "below whatever is there"
    assert terminal.text == wanted.text


def test_the_last_table_stays() -> None:
    with on_terminal() as terminal:
        table = live(terminal)
        print("no end of line", end="")
        table.show([ROW])
        table.end([ROW])
    told = terminal.text
    assert told.startswith("no end of line\n")
    assert told.count("DataLoader") == 2, "once in the name, once in the stages"
    assert "12.5/s" in told


def test_a_stream_that_goes_elsewhere_is_left_alone() -> None:
    file = io.StringIO()
    with on_terminal(file) as terminal:
        table = live(terminal)
        assert sys.stdout is file
        print("a result")
        table.show([ROW])
        table.end([])
    assert file.getvalue() == "a result\n"
    assert terminal.text == ""


def test_a_worker_writes_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork may have copied it while the thread that draws had it."""
    with on_terminal() as terminal:
        table = live(terminal)
        table.show([ROW])
        proxy, done = sys.stdout, threading.Event()
        with table._lock, monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            writer = threading.Thread(target=lambda: (proxy.write("of a worker\n"), done.set()))
            writer.start()
            assert done.wait(60)
            writer.join()
        assert terminal.text == "of a worker"
        table.end([])


def test_a_small_terminal_gets_a_part() -> None:
    with on_terminal() as terminal:
        table = live(terminal, (40, 5))
        print("first")
        table.show([ROW] * 10)
        assert terminal.text.startswith("first\n")
        table.end([])
    assert terminal.text == "first"


# -- no terminal -------------------------------------------------------------------------------------


def test_lines_tell_what_has_gone_on() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.show([ROW])
    lines.show([ROW])
    lines.end([ROW, ROW._replace(name="Pipeline", items=3)])
    assert stream.getvalue() == (
        "hybridloader: DataLoader: 100 batches, 12.5/s, stall 74% (sampler 0%, DataLoader 98% <). "
        "It waits.\n"
        "hybridloader: Pipeline: 3 batches, 12.5/s, stall 74% (sampler 0%, DataLoader 98% <). "
        "It waits.\n"
    )


def test_without_rich_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs rich .* pip install 'hybridloader\[watch\]'"):
        watch(Terminal())
    assert isinstance(watch(io.StringIO())._display, Lines)


SCRIPT = """
import sys
assert "torch" not in sys.modules
import torch

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(range(20), 2, num_workers=1)
    for epoch in range(2):
        for batch in loader:
            pass
        print("epoch", epoch)
    print("done", file=sys.stderr)
    sys.exit(3)
"""


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "hybridloader", "run", "--backend=threads", "--watch", "train.py"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (3, "epoch 0\nepoch 1\n")
    first, *told = done.stderr.splitlines()
    assert first == "done"
    assert len(told) == 1
    assert told[0].startswith("hybridloader: DataLoader: 10 batches, ")
