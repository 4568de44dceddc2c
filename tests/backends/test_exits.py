"""Programs that end while workers start, or while they compute for ever, leave no process and no noise.

Each trial is a script of its own, without a ``__main__`` guard, and workers make marks in a fifo.
`test_exit_matrix` tries far more ways to end, with workers that have started and that wait.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from support.platforms import DEADLINE

SCRIPT = """
    import os, sys
    from hybridloader import DataLoader

    backend, ending, state, fifo = sys.argv[1:]

    def mark():
        line = os.open(fifo, os.O_RDWR)
        os.write(line, b"!")
        os.close(line)

    class Dataset:
        def __len__(self):
            return 1_000_000_000

        def __getitem__(self, index):
            if state == "spinning" and index >= 4:
                mark()
                while True:
                    pass
            return index

    iterator = iter(DataLoader(Dataset(), num_workers=2, collate_fn=list, backend=backend))
    if state == "starting" and backend == "fork":
        mark()
    for number in range(4):
        assert next(iterator) == [number]
    sys.stdin.readline()
    if ending == "sys.exit":
        sys.exit(7)
    next(iterator)
"""

SLOW_START = """
    import os, sys, time

    if any("popen_loky" in word for word in sys.orig_argv):
        line = os.open(os.environ["FIFO"], os.O_RDWR)
        os.write(line, b"!")
        os.close(line)
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.01)
"""
"""The `sitecustomize` of a process for spawned workers: it is starting while its parent lives."""

CODES = {
    "sys.exit": 7,
    "SIGINT": -signal.SIGINT,
    "SIGTERM": -signal.SIGTERM,
    "SIGKILL": -signal.SIGKILL,
}
EVERYDAY = {
    ("fork", "SIGINT", "starting"),
    ("spawn", "SIGINT", "starting"),
    ("threads", "SIGINT", "spinning"),
}
TRIALS = [
    *(("fork", ending, "starting") for ending in CODES if ending != "sys.exit"),
    *(("spawn", ending, "starting") for ending in CODES if ending != "sys.exit"),
    *(
        (backend, ending, "spinning")
        for backend in ("threads", "fork", "spawn")
        for ending in CODES
    ),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches processes by pidfd"),
]


@pytest.mark.parametrize(
    ("backend", "ending", "state"),
    [
        pytest.param(
            *trial, id="-".join(trial), marks=() if trial in EVERYDAY else pytest.mark.full
        )
        for trial in TRIALS
    ],
)
def test_a_program_that_ends_leaves_no_process_and_no_noise(
    backend: str, ending: str, state: str, tmp_path: Path
) -> None:
    script, fifo = tmp_path / "script.py", tmp_path / "fifo"
    script.write_text(textwrap.dedent(SCRIPT))
    os.mkfifo(fifo)
    environment = dict(os.environ, FIFO=str(fifo))
    if state == "starting":
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(SLOW_START))
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(tmp_path), environment.get("PYTHONPATH")])
        )
    line = os.open(fifo, os.O_RDWR)
    with subprocess.Popen(
        [sys.executable, script, backend, ending, state, fifo],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            marks = 1 if state == "starting" else 2
            ended = os.pidfd_open(process.pid)
            while marks > 0:
                ready = multiprocessing.connection.wait([line, ended], DEADLINE)
                assert ready == [line], "it did not get ready"
                marks -= len(os.read(line, marks))
            os.close(ended)
            family = psutil.Process(process.pid).children(recursive=True)
            if ending == "SIGINT":  # as from a terminal: to the whole group
                os.killpg(process.pid, signal.SIGINT)
            elif ending != "sys.exit":
                process.send_signal(signal.Signals[ending])
            _, errors = process.communicate("end\n", timeout=DEADLINE)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            os.close(line)
    assert process.returncode == CODES[ending], errors
    if ending == "SIGINT":
        assert errors.count("Traceback (most recent call last)") == 1, errors
        assert errors.rstrip().splitlines()[-1].startswith("KeyboardInterrupt"), errors
        for noise in ("Exception ignored", "resource_tracker", "leaked", "Fatal", "terminate"):
            assert noise not in errors, errors
    else:
        assert errors == ""
    _, left = psutil.wait_procs(family, DEADLINE)
    # Orphans in a container may stay zombies.
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
