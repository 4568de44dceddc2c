"""``python -m benchmarks``: measure loaders side by side, and keep the results."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, page, runner
from benchmarks.cases import CASES
from benchmarks.loaders import is_rival, missing
from benchmarks.runner import AGAIN, BEFORE, Process


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    made.add_argument("--case", nargs="+", default=[*CASES], choices=CASES, metavar="CASE")
    made.add_argument("--rounds", type=int, help="rounds of each case, in place of its number")
    made.add_argument("--quick", action="store_true", help="tiny work: proves that all cases run")
    made.add_argument("--no-rivals", action="store_true", help="torch and hybridloader alone")
    made.add_argument("--json", type=Path, metavar="FILE", help="keep the results of these cases")
    made.add_argument("--pages", action="store_true", help="write the kept results into the pages")
    made.add_argument("--against", metavar="DIR", help="alternate with `pip install -t DIR`'s")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases. Return 1 if a loader of hybridloader failed, or batches were not the same."""
    options = parser().parse_args(arguments)
    began, failed = time.monotonic(), 0
    # Where it is set, each fresh worker compiles what has no bytecode: 16 took 0.16 s, not 0.12.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    about = machine.about()
    print(page.sentence(about))
    for name in options.case:
        case = CASES[name]
        spec = case.spec | (case.quick if options.quick else {})
        loaders = [one for one in case.loaders if not (is_rival(one) and options.no_rivals)]
        absent = {package for one in loaders if (package := missing(one))}
        loaders = [one for one in loaders if not missing(one)]
        if not case.alone:
            loaders.insert(1, loaders[0] + AGAIN)
        if options.against:
            loaders += [one + BEFORE for one in case.loaders if page.is_ours(one)]

        def start(loader: str) -> Process:
            return Process(library=options.against if loader.endswith(BEFORE) else "")

        def say(text: str, name: str = name) -> None:
            line = f"{time.monotonic() - began:5.0f} s  {name}: {text}"
            stays = "left out" in text
            if sys.stdout.isatty():
                print(f"\r{line:110.110}", end="\n" if stays else "", flush=True)
            elif stays:
                print(line, flush=True)

        if absent:
            say(f"left out, not installed: pip install {' '.join(sorted(absent))}")
        rounds = options.rounds or (1 if options.quick else case.rounds)
        try:
            quiet = runner.is_quiet if options.quick else runner.wait_for_quiet
            result = runner.run(case, loaders, spec, rounds, say, start, quiet)
        except runner.Mismatch as error:
            print(f"benchmarks: {name}: {error}", file=sys.stderr)
            failed = 1
            continue
        failed |= any(not is_rival(one) for one in result.failures)
        row = page.record(case, result, rounds, about)
        print(f"\n{case.title}", *page.lines(row), sep="\n  ", flush=True)
        if options.json and not options.quick:
            page.keep(options.json, name, row)  # after each case: nothing measured is lost
    if options.pages:
        page.write(page.RESULTS if options.json is None else options.json)
    print(f"{time.monotonic() - began:.0f} s")
    return failed


if __name__ == "__main__":
    # Ended from outside, it still ends its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
