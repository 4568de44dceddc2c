"""``python -m benchmarks``: see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, machine, registry
from benchmarks.case import Options
from benchmarks.display import Display
from benchmarks.quiet import Quiet
from benchmarks.recording import Recording, described, differences
from benchmarks.results import Results, relate
from benchmarks.targets import verdicts

ROUNDS = 5
QUICK_ROUNDS = 2

RETAKES = 2
"""Times that a variant is measured again because the machine was noisy."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    known = ", ".join(registry.CASES)
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure hybridloader beside torch's DataLoader, torchdata.nodes, SPDL and Grain.",
    )
    made.add_argument("--case", nargs="+", default=[], metavar="CASE", help=f"some of: {known}")
    made.add_argument("--quick", action="store_true", help="less of everything: some 15 minutes")
    made.add_argument("--rounds", type=int, help=f"repetitions ({ROUNDS}, quick {QUICK_ROUNDS})")
    made.add_argument("--workers", type=int, default=2, help="where a case does not say (2)")
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="keep what was measured; go on if it is there"
    )
    made.add_argument(
        "--afresh", action="store_true", help="measure anew what FILE has of these cases"
    )
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw a figure: .png or .svg")
    made.add_argument("--no-rivals", action="store_true", help="torch and hybridloader alone")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, show and keep. Returns 1 if loaders disagree about the batches, or ours broke."""
    made = parser()
    options = made.parse_args(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    if rounds < 1 or options.workers < 1:
        made.error("--rounds and --workers must be at least 1")
    chosen = Options(
        options.workers, options.quick, not options.no_rivals, caps=options.rounds is None
    )
    try:
        todo = registry.choose(options.case, chosen)
    except registry.UnknownCase as error:
        made.error(str(error))
    about = machine.about(
        quick=options.quick,
        rounds=rounds,
        caps=chosen.caps,
        workers=options.workers,
        rivals=chosen.rivals,
    )
    display = Display()
    display.say(machine.sentence(about))
    try:
        results = _results(about, options, [case.name for case in todo])
    except OtherRun as error:
        made.error(str(error))
    missing = [name for name, version in about["versions"].items() if version is None]
    if missing and chosen.rivals:
        _note(results, display, f"not installed, left out: {', '.join(missing)}")
    for note in harness.not_run(todo):
        _note(results, display, note)
    quiet = Quiet(limit=3.0, budget=30.0) if options.quick else Quiet()
    measuring = harness.Harness(
        display.steps(todo, rounds),
        # A quick run spares itself 10 s a case by going on with the same processes.
        keep=options.quick,
        quiet=quiet.wait,
    )
    recording = Recording(
        *(todo, results, rounds, measuring),
        keep=lambda found: found.write(options.json) if options.json else None,
        order=tuple(registry.CASES),
        retakes=0 if options.quick else RETAKES,
    )
    ahead = recording.todo()
    there = sum(len(case.variants) for case in todo) - len(ahead)
    minutes = recording.seconds_left(ahead) / 60
    display.say(f"{len(ahead)} variants to measure, {there} are there: some {minutes:.0f} minutes")
    try:
        recording.run()
    except harness.Mismatch as error:
        display.finish()
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    finally:
        measuring.close()
        display.finish()
    relate(results.measurements)
    if options.plot:
        from benchmarks.plot import draw

        draw(results, options.plot)
    titles = {case.name: case.title for case in todo}
    titles |= {case.derived.name: case.derived.title for case in todo if case.derived}
    display.tables(results, verdicts(results, registry.TARGETS), titles)
    for take in results.takes:
        if not take.quotable:
            print(f"benchmarks: {described(take)}", file=sys.stderr)
    for failure in results.failures():
        print(f"benchmarks: failed: {failure}", file=sys.stderr)
    return 1 if results.failures() else 0


class OtherRun(Exception):
    """The file has a run of other code, of another machine or with other options."""


def _results(about: dict[str, Any], options: argparse.Namespace, cases: list[str]) -> Results:
    """Results to go on with: those of the file, if it is of the same code, machine and options."""
    file: Path | None = options.json
    if file is None or not file.exists():
        return Results(about)
    kept = Results.read(file)
    differing = differences(about, kept.about)
    if differing and not options.afresh:
        raise OtherRun(
            f"{file} has a run that differs in {', '.join(differing)}: --afresh replaces it"
        )
    if differing:
        return Results(about)
    if options.afresh:
        kept.forget(cases)
    return kept


def _note(results: Results, display: Display, text: str) -> None:
    if text not in results.notes:
        results.notes.append(text)
    display.say(text)


if __name__ == "__main__":
    # Ended from outside, it still ends its runners.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
