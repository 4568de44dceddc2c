"""``python -m benchmarks.report results.json FILE...``: put the figures of a run into documents.

What is between ``<!-- benchmarks:begin NAME -->`` and ``<!-- benchmarks:end NAME -->`` is written anew.
NAME is a case, ``machine``, ``summary`` (ours against torch's and the best rival, a line per variant),
``headlines`` (five lines of the summary in plain words), ``targets``, ``missed`` (the targets that were
missed, and why), ``blanks`` (loaders that were left out, and why), ``notes`` or ``P18`` (the long run,
from its own file). Within a sentence, ``<!-- figure CASE; VARIANT; LOADER -->1.2 s<!-- end -->`` holds
one median with its unit. With ``--check`` nothing is written; the exit code is 1 if something would be.
A run that was too noisy is refused.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from benchmarks.display import best, cell, column_names, number, percent, with_noise
from benchmarks.long_run import record
from benchmarks.names import OURS, family, is_rival
from benchmarks.registry import CASES, TARGETS
from benchmarks.results import Measurement, Results, ratio
from benchmarks.targets import verdicts

HEADLINES = {
    ("P1", "38 MB"): "a batch of 256 images (38 MB), collated and handed over",
    ("P2", "64 ints"): "a batch of 64 integers: overhead alone",
    ("P5", "dataset without torch"): "first batch from 3 fresh processes",
    ("P3", "500x375"): "photographs (JPEG), decoded and resized by 2 workers",
    ("P4", "16 processes"): "the hybrid: waiting, decoding and Python in each item, 16 workers",
}
"""Case and beginning of a variant's name -> its description in the block ``headlines``."""

LONG_RUN = Path(__file__).parent / "long_run.json"
"""The kept long run."""

_BEGIN = re.compile(r"<!-- benchmarks:begin ([\w-]+) -->\n")
_FIGURE = re.compile(r"(<!-- figure ([^;]+);\s+([^;]+);\s+(.+?) -->)[^<]*(<!-- end -->)")


class BadBlock(ValueError):
    """A block has no end, or a name that nothing can be written for."""


def rewrite(text: str, results: Results) -> str:
    """`text` with its blocks filled in.

    Raises
    ------
    BadBlock
        There is none, one has no end, or the run has nothing for it.
    """
    out, position = [], 0
    for begin in _BEGIN.finditer(text):
        name = begin.group(1)
        mark = f"<!-- benchmarks:end {name} -->"
        end = text.find(mark, begin.end())
        if end < 0:
            raise BadBlock(f"the block {name!r} has no end: {mark}")
        out += [text[position : begin.end()], block(name, results), "\n"]
        position = end
    if not out and not _FIGURE.search(text):
        raise BadBlock("there is no block to fill in")

    def figure(match: re.Match[str]) -> str:
        begin, *names, end = match.groups()
        case, variant, loader = (" ".join(name.split()) for name in names)  # lines may be wrapped
        for row in results.of(case, variant):
            if row.loader == loader and row.values:
                return f"{begin}{number(row.median)} {row.unit.split(' /')[0]}{end}"
        raise BadBlock(f"the run has no figure for {case}; {variant}; {loader}")

    return _FIGURE.sub(figure, "".join(out) + text[position:])


def block(name: str, results: Results) -> str:
    """The Markdown for a block."""
    makers: dict[str, Callable[[Results], str]] = {
        "machine": _machine,
        "summary": _summary,
        "headlines": _headlines,
        "targets": _targets,
        "missed": _missed,
        "blanks": _blanks,
        "notes": _notes,
        "P18": lambda results: _long_run(LONG_RUN),
    }
    if name in makers:
        return makers[name](results)
    if name in results.cases():
        return _case(name, results)
    if name in CASES:
        return "*Not in the run that is quoted here.*"
    known = ", ".join((*results.cases(), *makers))
    raise BadBlock(f"nothing to write for {name!r}; there is: {known}")


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _long_run(file: Path) -> str:
    if not file.exists():
        return "*Not run yet.*"
    run = record.Run.read(file)
    text = f"{run.minutes:g} minutes a backend, seed {run.seed}, {run.about['date']}."
    picture = "![what each backend held, and its latencies, over time](long-run.png)"
    return f"{text}\n\n{_table(*record.table(run))}\n\n{picture}"


def _machine(results: Results) -> str:
    text = f"{machine.sentence(results.about)}. {_noise(results)}"
    if results.about.get("quick"):
        kind = "A `--quick` run (two rounds, fewer variants)"
        text = f"**{kind}: good for orders of magnitude, not for digits.** {text}"
    return text


def _noise(results: Results) -> str:
    """One sentence or two about the noise of the machine during a run."""
    noises = [(t.noise, f"{t.case}, {t.variant}") for t in results.takes if t.noise is not None]
    if not noises:
        return (
            "The noise of this machine was not measured, and batches were timed in the middle of "
            "epochs: the run is older than the method."
        )
    worst, where = max(noises)
    middle = statistics.median(noise for noise, _ in noises)
    text = (
        f"A loader measured twice differs from itself by {percent(middle)} in the median line, and "
        f"by {percent(worst)} in the worst ({where})."
    )
    restless = [f"{t.case} ({t.variant})" for t in results.takes if t.again and not t.quiet]
    if not restless:
        return text
    rest = f" and {len(restless) - _NAMED} more" if len(restless) > _NAMED else ""
    return f"{text} The machine was not quiet in: {', '.join(restless[:_NAMED])}{rest}."


_NAMED = 3
"""Variants of a restless machine that are named, at most."""


def unquotable(results: Results) -> list[str]:
    """A sentence for each variant that was too noisy to be quoted."""
    return [
        f"{t.case}, {t.variant}: {t.again} differs from itself by "
        + (f"{t.noise:.0%}" if t.noise is not None else "an unknown part")
        for t in results.takes
        if not t.quotable
    ]


def _case(name: str, results: Results) -> str:
    rows = [m for m in results.measurements if m.case == name]
    columns = column_names(rows)
    body = []
    for variant in results.variants(name):
        group = [m for m in rows if m.variant == variant]
        cells = (with_noise(results, name, variant), *(cell(group, c) for c in columns))
        body.append([text.replace("\n", "<br>") for text in cells])
    return _table([f"{name}, {rows[0].unit}", *columns], body)


def _summary(results: Results) -> str:
    body = []
    for case in results.cases():
        for variant in results.variants(case):
            found = compared(results, case, variant)
            if found is not None:
                limit = found.ours.versus_limit
                noise = results.noise(case, variant)
                body.append(
                    [
                        f"{case}, {variant}",
                        *found.ratios(),
                        "" if limit is None else f"{limit:.2f}",
                        "" if noise is None else percent(noise),
                        *found.values(),
                    ]
                )
    heading = ["case", "than torch", "than the best rival", "of the limit", "noise"]
    return _table([*heading, "torch", "best rival", "hybridloader"], body)


def _headlines(results: Results) -> str:
    body = []
    for (case, beginning), words in HEADLINES.items():
        variants = [v for v in results.variants(case) if v.startswith(beginning)]
        found = compared(results, case, variants[0]) if variants else None
        if found is not None:
            body.append([words, *found.ratios(), *found.values()])
    heading = ["", "less than torch", "less than the best rival", "torch", "best rival"]
    return _table([*heading, "hybridloader"], body)


@dataclass(frozen=True)
class Compared:
    """The best of ours in a variant, beside torch's and the best rival's."""

    ours: Measurement
    torch: Measurement | None
    rival: Measurement | None

    def ratios(self) -> list[str]:
        """Torch's and the best rival's value over ours."""
        torch, rival = self.ours.versus_torch, ratio(self.rival, self.ours)
        return [
            "" if torch is None else f"**{number(torch)}x**",
            "" if rival is None else f"{number(rival)}x",
        ]

    def values(self) -> list[str]:
        """Values of torch's, the best rival's and ours, with units and names."""
        rival = self.rival
        return [
            _value(self.torch),
            "" if rival is None else f"{_value(rival)} ({family(rival.loader)})",
            f"{_value(self.ours)} ({self.ours.loader})",
        ]


def compared(results: Results, case: str, variant: str) -> Compared | None:
    """The best of ours beside others; None if ours has no values, or the case is passed or failed."""
    group = results.of(case, variant)
    ours = [m for m in group if m.loader in OURS and m.passed is None]
    ours = [m for m in ours if m.loader != "inline"] or ours  # with workers, if they were
    if not ours:
        return None
    top = min(ours, key=lambda m: m.median)
    rival = min((m for m in group if is_rival(m.loader)), key=lambda m: m.median, default=None)
    return Compared(top, best(group, "torch"), rival)


def _value(row: Measurement | None) -> str:
    return "" if row is None or not row.values else f"{number(row.median)} {row.unit}"


def _targets(results: Results) -> str:
    words = {True: "met", False: "**missed**", None: "not measured"}
    body = [[v.case, v.target, v.reached, words[v.met]] for v in verdicts(results, TARGETS)]
    return _table(["case", "target", "reached", "verdict"], body)


def _missed(results: Results) -> str:
    missed = [v for v in verdicts(results, TARGETS) if v.met is False]
    if not missed:
        return "No target was missed."
    return "\n".join(
        f"- **{v.case}, {v.target}**: {v.reached}. {v.why or 'The reason was not looked into.'}"
        for v in missed
    )


def _blanks(results: Results) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for m in results.measurements:
        if m.skipped:
            cases = reasons.setdefault((m.loader, m.skipped.splitlines()[0]), [])
            if m.case not in cases:
                cases.append(m.case)
    body = [
        [loader, ", ".join(cases), reason.replace("|", "\\|")]
        for (loader, reason), cases in reasons.items()
    ]
    return _table(["loader", "cases", "why it is blank"], body)


def _notes(results: Results) -> str:
    return "\n".join(f"- {note}." for note in results.notes) or "No notes."


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the files.

    Returns 1 if `--check` finds one out of date, 2 if a block can't be filled or the run is too noisy.
    """
    made = argparse.ArgumentParser(prog="python -m benchmarks.report")
    made.add_argument("results", type=Path, help="what --json wrote")
    made.add_argument("files", type=Path, nargs="+", help="documents with marked blocks")
    made.add_argument("--check", action="store_true", help="only say what is out of date")
    options = made.parse_args(arguments)
    results = Results.read(options.results)
    noisy = unquotable(results)
    if noisy:
        cases = " ".join(dict.fromkeys(t.case for t in results.takes if not t.quotable))
        print(
            "too noisy to be quoted:",
            *noisy,
            f"measure them again: python -m benchmarks --json {options.results} --case {cases}",
            sep="\n  ",
            file=sys.stderr,
        )
        return 2
    stale = False
    for file in options.files:
        text = file.read_text()
        try:
            new = rewrite(text, results)
        except BadBlock as error:
            print(f"{file}: {error}", file=sys.stderr)
            return 2
        if new != text:
            stale = True
            if options.check:
                print(f"{file}: out of date", file=sys.stderr)
            else:
                file.write_text(new)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
