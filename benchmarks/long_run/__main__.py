"""``python -m benchmarks.long_run``: see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.long_run.part import part
from benchmarks.long_run.picture import draw
from benchmarks.long_run.record import BACKENDS, OtherRun, Part, Run, verdict
from benchmarks.runner import Runner, RunnerFailed, RunnerLike

MINUTES = 24.0
ONE_ARENA = ("env", "MALLOC_ARENA_MAX=1")
"""Prefix of a runner: glibc gives threads arenas, up to 8 for each core, and each keeps megabytes that
were freed, more as time goes on: 40 MB here in four minutes of `threads`. With one arena, what grows is
held by the program."""

PATIENCE = 300.0
"""Seconds beyond its time after which a part counts as a hang."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.long_run", description=__doc__)
    made.add_argument("--minutes", type=float, default=MINUTES, help=f"a backend ({MINUTES:g})")
    made.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, default=Path("benchmarks/long_run.json"), metavar="FILE")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw a figure: .png or .svg")
    return made


def main(
    arguments: Sequence[str] | None = None,
    make_runner: Callable[[float], RunnerLike] | None = None,
) -> int:
    """Do the parts that are missing, one after the other. Returns 1 if one failed or something grew."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        run = Run.resume(options.json, machine.about(), options.minutes, options.seed)
    except OtherRun as error:
        made.error(str(error))
    backends = tuple(options.backends)
    for backend in run.missing(backends):
        print(f"{backend}: {options.minutes:g} minutes", flush=True)
        seconds = 60 * options.minutes
        timeout = seconds + PATIENCE
        with contextlib.closing((make_runner or _runner)(timeout)) as runner:
            run.add(_done(runner, backend, {"seconds": seconds, "seed": options.seed}))
        run.write(options.json)  # after each part: what was measured is not lost
    if options.plot:
        draw(run, options.plot)
    verdicts = {part.backend: verdict(part) for part in run.parts}
    for backend, word in verdicts.items():
        print(f"{backend}: {word}")
    return int(any(word != "as at the beginning" for word in verdicts.values()))


def _runner(timeout: float) -> RunnerLike:
    return Runner(ONE_ARENA, timeout)


def _done(runner: RunnerLike, backend: str, spec: dict[str, float]) -> Part:
    try:
        answer = runner.ask(part, backend, spec)
    except RunnerFailed as error:
        return Part(backend, failed=str(error))
    if "skipped" in answer:
        return Part(backend, failed=answer["skipped"])
    return Part(backend, answer["looks"], answer["tally"])


if __name__ == "__main__":
    # Ended from outside, it still ends its runners.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
