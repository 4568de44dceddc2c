"""Runners: one fresh process for each loader, so that none forks what another one left behind.

A runner waits while others measure. It is asked over a pipe; one that does not answer in time is killed
with all that it started.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.case import Answer, Measure, Spec

ROOT = Path(__file__).resolve().parent.parent


class RunnerFailed(Exception):
    """A runner died, or did not answer in time."""


class RunnerLike(Protocol):
    """A runner, as the harness uses it; tests bring their own."""

    @property
    def pid(self) -> int: ...
    def ask(
        self, measure: Measure, loader: str, spec: Spec, idle: Callable[[], None] | None = None
    ) -> Answer: ...
    def close(self) -> None: ...


class Runner:
    """A process that runs `benchmarks.runner_main`.

    Parameters
    ----------
    prefix
        A command to run it under.
    timeout
        Seconds to wait for an answer.
    """

    def __init__(self, prefix: Sequence[str] = (), timeout: float = 120.0) -> None:
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.runner_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )
        self._ready = False
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self, measure: Measure, loader: str, spec: Spec, idle: Callable[[], None] | None = None
    ) -> Answer:
        """Have something measured, and wait for the answer.

        Parameters
        ----------
        measure
            Function of a module, which the runner imports by its name.
        idle
            Called ten times a second while waiting.

        Raises
        ------
        RunnerFailed
            No answer came. The runner is closed.
        """
        if not self._ready:
            self._answer(None)
            self._ready = True
        assert self._process.stdin is not None
        name = f"{measure.__module__}:{measure.__name__}"
        command = json.dumps({"measure": name, "loader": loader, "spec": spec}) + "\n"
        try:
            self._process.stdin.write(command.encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it has died: the answer will be missing, and say why
        return self._answer(idle)

    def _answer(self, idle: Callable[[], None] | None) -> Answer:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if idle is not None:
                    idle()
                if selector.select(0.1):
                    data = os.read(self._process.stdout.fileno(), 1 << 16)
                    if not data:
                        self._fail("died")
                    self._buffer += data
                elif self._process.poll() is not None:
                    self._fail("died")  # a worker may still hold the pipe open
                elif time.monotonic() > deadline:
                    self._fail(f"gave no answer within {self._timeout:.0f} s")
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: Answer = json.loads(line)
        return answer

    def _fail(self, what: str) -> None:
        said = self.errors().strip().splitlines()[-1:] or [""]
        self.close(grace=2.0 if what == "died" else 0.0)
        code = self._process.returncode
        raise RunnerFailed(f"{what} (exit code {code}) {said[0][:160]}".strip())

    def errors(self) -> str:
        """Text that the runner has written to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self, grace: float = 2.0) -> None:
        """End it, after `grace` seconds by force, and everything that it started."""
        if self._errors.closed:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: see start_new_session
        except OSError:
            pass
        self._process.wait()
        self._errors.close()


def small_devshm() -> list[str]:
    """The prefix under which /dev/shm has 64 MB.

    Raises
    ------
    RunnerFailed
        It is not permitted here.
    """
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", script, "sh"]
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunnerFailed(f"can't mount a small /dev/shm: {error}") from None
    if done.returncode:
        raise RunnerFailed(f"can't mount a small /dev/shm (root is needed): {done.stderr.strip()}")
    return prefix
