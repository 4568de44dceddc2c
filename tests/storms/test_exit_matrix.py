"""However, wherever and whenever a program ends: its workers are gone, quickly and without a word.

Causes by backends by ways to use them, each trial in a separate process (see `exit_trial`). A part of
the matrix is run each time; there every cause meets forked workers, and some of them meet other
processes or workers of this process. The rest is marked `full`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.exit_supervisor import LOADERS, SIGNALS, Trial
from support.exit_trial import CAUSES, PROCESSES
from support.made_once import folder_made_once
from support.platforms import REPOSITORY

TOGETHER = 120
"""Trials that are made by one set of interpreters."""

BACKENDS = ("inline", "threads", "fork", "spawn", "fresh", "shared-memory")
MODES = (*LOADERS, "run", "epochs")
CODES = {
    "raise": 1,
    "sys.exit": 7,
    "os._exit": 7,
    **{name: -signal.Signals[name] for name in SIGNALS if hasattr(signal, name)},
}
"""Exit codes of programs; 0 for those that are not named."""

OTHER = {
    "exhaust": "threads",
    "raise": "spawn",
    "SIGINT": "inline",
    "SIGKILL": "shared-memory",
    "from-a-daemon-thread": "threads",
    "in-a-spawned-process": "fresh",
}
"""The workers, besides forked ones, that a cause meets each time."""

TRACEBACKS = {"raise": "LookupError: the end of the script", "SIGINT": "KeyboardInterrupt"}
"""The last line of what the cause itself prints."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"),
        reason="adopts orphans by prctl, follows processes by pidfd",
    ),
]


def matrix() -> list[Trial]:
    """All trials."""
    trials = [
        Trial(cause, backend, mode)
        for cause in CAUSES
        for backend in BACKENDS
        for mode in MODES
        # Before Python 3.14 a daemon thread that runs torch's code when the interpreter ends is unwound
        # through C++, which aborts: "terminate called without an active exception".
        if (cause, backend) != ("from-a-daemon-thread", "inline")
    ]
    # Workers that do not listen. A stopped one can't see that its parent has gone, so these causes
    # leave the parent the time to end it.
    for cause in ("del", "raise", "sys.exit", "SIGINT"):
        trials += [
            Trial(cause, backend, mode, stuck)
            for backend in PROCESSES
            for mode in MODES
            for stuck in ("wait", "deaf", "stopped")
        ]
        trials += [Trial(cause, "threads", mode, "wait") for mode in MODES]
    for cause in ("os._exit", "SIGTERM", "SIGKILL"):
        trials += [
            Trial(cause, backend, mode, stuck)
            for backend in PROCESSES
            for mode in MODES
            for stuck in ("wait", "deaf")
        ]
    return trials


def part(trials: list[Trial]) -> list[Trial]:
    """One mode for each of what else there is, in turn: forked workers, and some of the others."""
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.cause, trial.backend, trial.stuck), []).append(trial)
    plain = [
        group
        for (cause, backend, stuck), group in groups.items()
        if not stuck and backend in ("fork", OTHER.get(cause))
    ]
    # Stuck workers take the two seconds that they may: of them an eleventh.
    stuck = [group for group in groups.values() if group[0].stuck][::11]
    return [group[_turn(group[0]) % len(group)] for group in [*plain, *stuck]]


def _turn(trial: Trial) -> int:
    """One mode further for each cause and each backend: so each of these meets all modes."""
    return list(CAUSES).index(trial.cause) + BACKENDS.index(trial.backend)


class Outcome(NamedTuple):
    """Outcome of a trial; see `exit_supervisor.follow`."""

    reached: bool
    code: int | None
    ended: float
    gone: float
    left: list[str]
    stderr: str


PART = set(part(matrix()))
TRIALS = [
    pytest.param(trial, marks=() if trial in PART else pytest.mark.full, id=str(trial))
    for trial in matrix()
]


@pytest.fixture(scope="module")
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Trial], Outcome]:
    """Makes a trial, and those near it: in the same interpreters, which take seconds to get ready.

    Not all of them, because tests may be divided among several processes; each part is made once, by
    whichever of these comes to it first.
    """
    chosen: list[Any] = [
        item.callspec.params["trial"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
        if item.originalname == test_a_program_ends_with_all_its_processes_and_no_noise.__name__
    ]
    found: dict[Trial, Outcome] = {}

    def make(trial: Trial) -> Outcome:
        if trial not in found:
            first = chosen.index(trial) // TOGETHER * TOGETHER
            given = chosen[first : first + TOGETHER]
            root = folder_made_once(
                tmp_path_factory, f"exits-{first}", lambda root: run(given, root)
            )
            found.update(outcomes(given, root))
        return found[trial]

    return make


def run(trials: list[Trial], root: Path) -> None:
    (root / "trials.json").write_text(json.dumps(trials))
    tests = REPOSITORY / "tests"
    subprocess.run(
        [sys.executable, tests / "support" / "exit_trial.py", root],
        env={**os.environ, "PYTHONPATH": str(tests)},
        check=True,
        stdin=subprocess.DEVNULL,
    )


def outcomes(trials: list[Trial], root: Path) -> dict[Trial, Outcome]:
    found = {}
    for number, trial in enumerate(trials):
        where = root / str(number)
        seen = json.loads((where / "outcome.json").read_text())
        found[trial] = Outcome(**seen, stderr=(where / "2").read_text())
    return found


def complaints(trial: Trial, outcome: Outcome) -> list[str]:
    """Faults in the end of a trial."""
    found = []
    if not outcome.reached:
        found.append("it never came to its cause")
    if outcome.left:
        found.append(f"after {outcome.gone:.1f} seconds there was still: {outcome.left}")
    if outcome.code != CODES.get(trial.cause, 0):
        found.append(f"exit code {outcome.code}")
    last = TRACEBACKS.get(trial.cause)
    lines = outcome.stderr.rstrip().splitlines()
    expected = 0 if last is None else 1
    if outcome.stderr.count("Traceback (most recent call last)") != expected:
        found.append("more or fewer tracebacks than its cause has")
    if last is None and lines:
        found.append("words on stderr")
    if last is not None and not (lines and lines[-1].startswith(last)):
        found.append(f"the last line is not {last!r}")
    noise = ("Exception ignored", "resource_tracker", "leaked", "Fatal", "terminate", "Warning")
    found += [f"{word!r} on stderr" for word in noise if word in outcome.stderr]
    return found


@pytest.mark.parametrize("trial", TRIALS)
def test_a_program_ends_with_all_its_processes_and_no_noise(
    trial: Trial, outcome_of: Callable[[Trial], Outcome]
) -> None:
    outcome = outcome_of(trial)
    assert not complaints(trial, outcome), outcome.stderr
