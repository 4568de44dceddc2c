"""However, wherever and whenever a program ends: its workers are gone, quickly and without a word.

Causes by backends by ways to use them, each trial in a separate process (see `exit_trial`). A part of
the matrix is run each time; there every cause meets forked workers, and either other processes or
workers of this process. The rest is marked `full`.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.exit_supervisor import LOADERS, SIGNALS, Trial
from support.exit_trial import CAUSES, PROCESSES
from support.made_once import folder_made_once

import hybridloader

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

NAMED = ("break", "del", "sys.exit", "os._exit", *SIGNALS)
"""Causes that meet workers whose segments have names, which outlive a process if anything does."""

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
    trials += [Trial(cause, "named", mode) for cause in NAMED for mode in MODES]
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
    """One mode for each of what else there is, in turn, with some of the backends for each cause."""
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.cause, trial.backend, trial.stuck), []).append(trial)
    plain = [
        group
        for group in groups.values()
        if not group[0].stuck and group[0].backend in _backends(group[0].cause)
    ]
    # Stuck workers take the two seconds that they may: of them a seventh.
    stuck = [group for group in groups.values() if group[0].stuck][::7]
    return [group[_turn(group[0]) % len(group)] for group in [*plain, *stuck]]


def _backends(cause: str) -> tuple[str, ...]:
    """Forked workers, and in turn workers of this process and one kind of fresh or other ones."""
    turn = list(CAUSES).index(cause)
    own = "threads" if turn % 4 or cause == "from-a-daemon-thread" else "inline"
    named = "named" if cause in NAMED else "fresh"
    other = ("spawn", named, "shared-memory", "fresh")[turn // 2 % 4]
    return "fork", other if turn % 2 else own


def _turn(trial: Trial) -> int:
    """One mode further for each cause and each backend: so each of these meets all modes."""
    return list(CAUSES).index(trial.cause) + [*BACKENDS, "named"].index(trial.backend)


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
    tests = Path(__file__).parents[1]
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


def test_no_finalizer_needs_what_may_be_gone_when_python_ends() -> None:
    """By then a module's names may be None. A function's defaults live as long as it does."""
    folder = Path(hybridloader.__file__).parent
    files = [*folder.rglob("*.py"), *folder.parent.glob("backends/**/*.py")]
    found = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                first = ast.unparse(node.body[-1]).splitlines()[0]
                names = {part.id for part in ast.walk(node.body[-1]) if isinstance(part, ast.Name)}
                found[path.name] = first.startswith("if not ending()") or names == {"self"}
    assert found
    assert all(found.values()), found


# -- the instrument --------------------------------------------------------------------------------


def test_in_the_part_of_the_matrix_every_cause_meets_two_kinds_of_workers() -> None:
    trials = part(matrix())
    plain = [trial for trial in trials if not trial.stuck]
    met = Counter(trial.cause for trial in plain)
    assert met == dict.fromkeys(CAUSES, 2)
    assert {trial.cause for trial in plain if trial.backend == "fork"} == {*CAUSES}
    assert {trial.backend for trial in plain} == {*BACKENDS, "named"}
    for backend in ("fork", "threads"):
        assert len({t.mode for t in plain if t.backend == backend}) >= 3, backend
    for stuck in ("wait", "deaf", "stopped"):
        assert len({(t.cause, t.backend) for t in trials if t.stuck == stuck}) >= 2


CLEAN = Outcome(True, 0, 0.5, 0.5, [], "")
TRACE = "Traceback (most recent call last):\n  File x\n"


@pytest.mark.parametrize(
    ("cause", "outcome", "word"),
    [
        ("break", CLEAN._replace(reached=False), "never"),
        ("break", CLEAN._replace(left=["a worker"]), "a worker"),
        ("break", CLEAN._replace(code=1), "exit code 1"),
        ("break", CLEAN._replace(stderr="hm\n"), "words"),
        ("break", CLEAN._replace(stderr=f"{TRACE}OSError"), "tracebacks"),
        ("SIGINT", CLEAN._replace(code=-2), "tracebacks"),
        ("SIGINT", CLEAN._replace(code=-2, stderr=2 * f"{TRACE}KeyboardInterrupt\n"), "tracebacks"),
        ("SIGINT", CLEAN._replace(code=-2, stderr=f"{TRACE}OSError\n"), "last line"),
        (
            "raise",
            CLEAN._replace(
                code=1, stderr=f"Exception ignored in: f\n{TRACE}{TRACEBACKS['raise']}\n"
            ),
            "Exception ignored",
        ),
    ],
)
def test_what_is_wrong_is_seen(cause: str, outcome: Outcome, word: str) -> None:
    found = complaints(Trial(cause, "fork", "loader"), outcome)
    assert word in "; ".join(found)


@pytest.mark.parametrize(
    ("cause", "outcome"),
    [
        ("break", CLEAN),
        ("raise", CLEAN._replace(code=1, stderr=f"{TRACE}{TRACEBACKS['raise']}\n")),
        ("SIGKILL", CLEAN._replace(code=-9)),
    ],
)
def test_a_clean_end_is_not_complained_of(cause: str, outcome: Outcome) -> None:
    assert complaints(Trial(cause, "fork", "loader"), outcome) == []
