"""``python -m benchmarks``: see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness, machine, registry
from benchmarks.case import Options
from benchmarks.display import Display
from benchmarks.results import Results, relate
from benchmarks.targets import verdicts

ROUNDS = 5
QUICK_ROUNDS = 2


def parser() -> argparse.ArgumentParser:
    """The options."""
    known = ", ".join(registry.CASES)
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure hybridloader beside torch's DataLoader, torchdata.nodes, SPDL and Grain.",
    )
    made.add_argument("--case", nargs="+", default=[], metavar="CASE", help=f"some of: {known}")
    made.add_argument("--quick", action="store_true", help="less of everything: some 9 minutes")
    made.add_argument("--rounds", type=int, help=f"repetitions ({ROUNDS}, quick {QUICK_ROUNDS})")
    made.add_argument("--workers", type=int, default=2, help="where a case does not say (2)")
    made.add_argument("--json", type=Path, metavar="FILE", help="keep what was measured")
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
        quick=options.quick, rounds=rounds, workers=options.workers, cases=options.case or "all"
    )
    display = Display()
    display.say(machine.sentence(about))
    missing = [name for name, version in about["versions"].items() if version is None]
    results = Results(about)
    if missing and chosen.rivals:
        results.notes.append(f"not installed, left out: {', '.join(missing)}")
        display.say(results.notes[-1])
    steps = display.steps(todo, rounds)
    titles = {case.name: case.title for case in todo}
    titles |= {case.derived.name: case.derived.title for case in todo if case.derived}
    for note in harness.not_run(todo):
        results.notes.append(note)
        display.say(note)
    # A quick run spares itself 10 s a case by going on with the same processes.
    runners: harness.Runners | None = {} if options.quick else None
    try:
        for case in todo:
            results.measurements += harness.run_case(case, rounds, steps, runners=runners)
            if options.json:  # after each case: what was measured is not lost if a later one is
                results.write(options.json)
    except harness.Mismatch as error:
        display.finish()
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    finally:
        harness.close_all(runners or {})
        display.finish()
    relate(results.measurements)
    if options.plot:
        from benchmarks.plot import draw

        draw(results, options.plot)
    display.tables(results, verdicts(results, registry.TARGETS), titles)
    for failure in results.failures():
        print(f"benchmarks: failed: {failure}", file=sys.stderr)
    return 1 if results.failures() else 0


if __name__ == "__main__":
    # Ended from outside, it still ends its runners.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
