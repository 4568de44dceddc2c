"""Programs that end while workers start leave no process and no noise.

Each trial is a script of its own, without a ``__main__`` guard, and makes a mark in a fifo.
`test_exit_matrix` tries far more ways to end, with workers that have started.
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

    backend, fifo = sys.argv[1:]
    iterator = iter(DataLoader(range(10**9), num_workers=2, collate_fn=list, backend=backend))
    if backend == "fork":
        line = os.open(fifo, os.O_RDWR)
        os.write(line, b"!")
        os.close(line)
    for number in range(4):
        assert next(iterator) == [number]
    sys.stdin.readline()
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches processes by pidfd"),
]


@pytest.mark.parametrize("backend", [pytest.param("fork", marks=pytest.mark.full), "spawn"])
@pytest.mark.parametrize(
    "ending",
    ["SIGINT", *(pytest.param(name, marks=pytest.mark.full) for name in ("SIGTERM", "SIGKILL"))],
)
def test_a_program_that_ends_while_workers_start_leaves_no_process_and_no_noise(
    backend: str, ending: str, tmp_path: Path
) -> None:
    script, fifo = tmp_path / "script.py", tmp_path / "fifo"
    script.write_text(textwrap.dedent(SCRIPT))
    os.mkfifo(fifo)
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(SLOW_START))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = dict(os.environ, FIFO=str(fifo), PYTHONPATH=path)
    line = os.open(fifo, os.O_RDWR)
    with subprocess.Popen(
        [sys.executable, script, backend, fifo],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            ended = os.pidfd_open(process.pid)
            ready = multiprocessing.connection.wait([line, ended], DEADLINE)
            assert ready == [line], "it did not get ready"
            os.close(ended)
            family = psutil.Process(process.pid).children(recursive=True)
            if ending == "SIGINT":  # as from a terminal: to the whole group
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.send_signal(signal.Signals[ending])
            _, errors = process.communicate("end\n", timeout=DEADLINE)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            os.close(line)
    assert process.returncode == -signal.Signals[ending], errors
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
