"""Runner: a fresh process for each loader of a case, asked in turn, in interleaved rounds.

No loader forks what another one left, and a slow minute of the machine meets all of them.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.cases import SCALES, Case
from benchmarks.machine import ROOT

AGAIN = " (again)"
"""End of the name of the loader that is measured twice, whose difference is the noise."""

BEFORE = " (before)"
"""End of the name of a loader of an earlier hybridloader."""

BUSY = 0.1
"""Part of all cores that others may use at most; a machine where they use more is not quiet."""

NOISE = 0.1
"""Greatest difference of a loader from itself with which a row is shown."""

PATIENCE = 15.0
"""Seconds that a round waits for a quiet machine."""


class Failed(Exception):
    """A loader raised, died or gave no answer in time."""


class Mismatch(Exception):
    """Loaders did not deliver the same batches."""


class Process:
    """Python process that answers questions, a line of JSON each.

    It runs `module` under the command `prefix`. After `timeout` seconds without an answer it is killed
    with all that it started. `library` is a folder with another hybridloader.
    """

    def __init__(
        self,
        module: str = "benchmarks.measure",
        prefix: Sequence[str] = (),
        timeout: float = 240.0,
        library: str = "",
    ) -> None:
        paths = filter(None, (library, os.environ.get("PYTHONPATH"), str(ROOT)))
        environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
        self._timeout, self._heard = timeout, b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
            start_new_session=True,
            cwd=library or None,
        )

    def ask(self, measure: str, loader: str, spec: dict[str, Any], rehearsal: bool = False) -> Any:
        """Return the answer to a question. Raises `Failed` if it is an error, or does not come."""
        asked = {"measure": measure, "loader": loader, "spec": spec, "rehearsal": rehearsal}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has died: no answer will come
        answer = json.loads(self._line())
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if selector.select(0.5):
                    data = os.read(self._process.stdout.fileno(), 1 << 16)
                    self._heard += data or self._fail("died")
                elif self._process.poll() is not None:
                    self._fail("died")  # a worker may still hold the pipe open
                elif time.monotonic() > deadline:
                    self._fail(f"gave no answer within {self._timeout:.0f} s")
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _fail(self, event: str) -> Any:
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        self.close()
        raise Failed(
            f"{event}, exit code {self._process.returncode} {' '.join(last)[:160]}".strip()
        )

    def close(self) -> None:
        """End the process, after two seconds by force, and everything that it started."""
        if self._errors.closed:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._errors.close()


@dataclass
class Result:
    """Values of a case, by loader, in its unit; loaders that failed are in `failures`."""

    values: dict[str, list[float]]
    failures: dict[str, str]
    noise: float | None
    quiet: bool


def interleaved(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield pairs (round, name): every name once a round, each round beginning with the next name."""
    for number in range(rounds):
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            yield number, name


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the least and the greatest value."""
    return statistics.median(values), min(values), max(values)


def busy_share(seconds: float = 0.2) -> float:
    """Return the part of all cores that others use while this process rests for so long."""
    before = psutil.cpu_times()
    time.sleep(seconds)
    after = psutil.cpu_times()
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    total = sum(spent.values())
    return 1 - (spent["idle"] + spent.get("iowait", 0.0)) / total if total > 0 else 0.0


def is_quiet() -> bool:
    """Return True if others use little of the cores now."""
    return busy_share() <= BUSY


def wait_for_quiet(
    share: Callable[[], float] = busy_share, patience: float = PATIENCE, clock: Any = time.monotonic
) -> bool:
    """Wait until others use little of the cores; return False if that takes longer than `patience`."""
    until = clock() + patience
    while share() > BUSY:
        if clock() > until:
            return False
    return True


def run(
    case: Case,
    loaders: Sequence[str],
    spec: dict[str, Any],
    rounds: int,
    say: Callable[[str], None],
    make: Callable[[str], Any],
    quiet: Callable[[], bool] = wait_for_quiet,
) -> Result:
    """Measure the loaders of a case.

    `AGAIN` and `BEFORE` are no part of the loader that is asked for. `make` starts the process of a
    loader. Raises `Mismatch` if two loaders did not deliver the same batches.
    """
    processes: dict[str, Any] = {}
    values: dict[str, list[float]] = {name: [] for name in loaders}
    failures: dict[str, str] = {}
    digests: dict[str, tuple[str, str]] = {}
    calm = True

    def ask(name: str, rehearsal: bool) -> None:
        try:
            loader = name.removesuffix(AGAIN).removesuffix(BEFORE)
            answer = processes[name].ask(case.measure, loader, spec, rehearsal)
        except Failed as error:
            failures[name] = str(error)
            say(f"{name} left out: {error}")
            return
        kind = "rehearsal" if rehearsal and "value" not in answer else "round"
        if "digest" in answer:
            first, expected = digests.setdefault(kind, (name, answer["digest"]))
            if answer["digest"] != expected:
                raise Mismatch(f"{name} did not deliver the batches that {first} delivers")
        if not rehearsal:
            values[name].append(answer["value"] * SCALES[case.unit])

    try:
        for name in loaders:
            processes[name] = make(name)
            if not case.alone:
                say(f"{name}, rehearsal")
                ask(name, True)
        before = -1
        for number, name in interleaved(loaders, rounds):
            if number > before:
                calm &= quiet()
                before = number
            if name not in failures:
                say(f"{name}, round {number + 1} of {rounds}")
                ask(name, False)
    finally:
        for process in processes.values():
            process.close()
    values = {name: found for name, found in values.items() if name not in failures}
    return Result(values, failures, noise(values), calm)


def noise(values: dict[str, list[float]]) -> float | None:
    """Return the difference of the loader that was measured twice from itself; None if none was."""
    for name, found in values.items():
        other = values.get(name + AGAIN)
        if other:
            one, two = statistics.median(found), statistics.median(other)
            return abs(one - two) / max(min(one, two), 1e-9)
    return None
