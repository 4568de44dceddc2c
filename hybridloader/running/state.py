"""States of runs as dicts of JSON values: written here, and checked here.

A state holds the position of a run and the descriptions of its steps, and no item. A state that can't be
gone on from exactly is refused before anything is started; the error names the field and both values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from hybridloader._support.states import (
    COUNT,
    LIST,
    TEXT,
    TRUTH,
    WHOLE,
    Rule,
    Schema,
    dict_of,
    list_of,
)
from hybridloader.errors import StateError
from hybridloader.running.operator import INFINITE, Chain, Mark, Source, steps_in

VERSION = 5
"""Version of states; it changes with the meaning of a field, and with the order that a seed gives."""

KIND = "pipeline"

SOURCES = (":0", ":0-0")
"""Names of the source in marks: of one that the loop's thread reads, and of readers."""

_MARK = Rule(
    "a mark",
    lambda mark: (
        isinstance(mark, Mapping)
        and set(mark) == set(Mark._fields)
        and type(mark["at"]) is type(mark["epoch"]) is int
    ),
)


class Heads(NamedTuple):
    """Inputs that come first after states of ranks were merged, and of which a part was had."""

    place: str
    """Name of the node that makes several items of one."""
    had: Sequence[int]
    """Number of its items that were had, for each of these inputs; ranks take turns at them."""


_HEADS = Rule(
    "None, or a name and whole numbers",
    lambda heads: (
        heads is None
        or (
            LIST.fits(heads)
            and len(heads) == 2
            and TEXT.fits(heads[0])
            and LIST.fits(heads[1])
            and all(map(COUNT.fits, heads[1]))
        )
    ),
)


@dataclass(frozen=True)
class Position:
    """Contents of a state."""

    seed: int
    seeded: bool
    """True if the user gave the seed of the run."""
    epoch: int
    given: int
    """Items that your loop was given, and errors in the places of items."""
    raised: int
    """Those of them that were errors."""
    finished: bool = False
    """True if your loop received `StopIteration`."""
    draws: Mapping[str, int] = field(default_factory=dict)
    """Seeds of sources, by path; see `Executor.draw`."""
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """Marks, by place."""
    ranks: list[int] = field(default_factory=list)
    """Numbers of ranks among which sources share their items."""
    rank: list[int] = field(default_factory=list)
    """Numbers of this rank among these; none in a state that was merged."""
    heads: Heads | None = None

    @property
    def own_heads(self) -> Sequence[int]:
        """Numbers of items that were had of the first inputs of this rank; see `Heads`."""
        return self.heads.had[self.rank[0] :: self.ranks[0]] if self.heads and self.rank else ()

    @property
    def begun(self) -> bool:
        """True if some of the epoch was given, here or before states were merged."""
        values = [mark.value for name, mark in self.marks.items() if name in SOURCES]
        return bool(
            self.given
            or None in values
            or any(
                isinstance(value, dict)
                and (value.get("position") or value.get("left") or value.get("readers") == [])
                for value in values
            )
        )

    @property
    def next_epoch(self) -> int:
        """Epoch in which a run resumes: that of the state, or the one after it."""
        return self.epoch + self.finished

    def as_dict(self, operators: list[str]) -> dict[str, Any]:
        """Return the state."""
        marks = {place: mark._asdict() for place, mark in self.marks.items()}
        own = {**vars(self), "draws": dict(self.draws), "marks": marks, "ranks": list(self.ranks)}
        own["rank"] = list(self.rank)
        own["heads"] = None if self.heads is None else [self.heads.place, [*self.heads.had]]
        return {"version": VERSION, "kind": KIND, **own, "operators": list(operators)}


_FIELDS = Schema(
    "pipeline's run",
    (WHOLE, "seed"),
    (TRUTH, "seeded finished"),
    (COUNT, "epoch given raised"),
    (list_of(TEXT, "a list of texts"), "operators"),
    (LIST, "ranks rank"),
    (_HEADS, "heads"),
    (dict_of(WHOLE, "a dict of whole numbers"), "draws"),
    (dict_of(_MARK, "a dict of marks, each with its epoch, place and value"), "marks"),
    version=VERSION,
    kind=("kind", KIND),
    exact=True,
)


def shares_of(pipeline: Chain) -> tuple[list[int], list[int]]:
    """Return the numbers of ranks among which its sources share their items, and of this one in each."""
    found = [step.share for step in steps_in(pipeline) if isinstance(step, Source) and step.share]
    return [ranks for ranks, _ in found], [rank for _, rank in found]


def descriptions(pipeline: Chain) -> list[str]:
    """Describe the steps that decide which items come in which order, and not where or how fast.

    A run must have them in common with the run from whose state it resumes.
    """
    return list(_described(pipeline, "", {}))


def _described(pipeline: Chain, indent: str, tees: dict[int, int]) -> Iterator[str]:
    for operator in pipeline.operators:
        text, place = operator.identity(), operator.tee_place
        if text is None:
            continue
        branches = operator.branches()
        if place is not None:
            branches = () if id(place[0]) in tees else branches
            text = f"{text} of tee {tees.setdefault(id(place[0]), len(tees))}"
        yield f"{indent}{text}"
        for branch in branches:
            yield from _described(branch, indent + "| ", tees)


# -- checks ------------------------------------------------------------------------------------------


def checked(
    state: Any,
    pipeline: Chain,
    *,
    epoch: int | None = None,
    seed: int | None = None,
    any_ranks: bool = False,
) -> Position:
    """Return the contents of a state; raise `StateError` if `pipeline` can't resume from it.

    `epoch` and `seed` are those that the user gave; None takes those of the state. With `any_ranks` it
    need not resume by itself on this number of ranks.
    """
    _FIELDS.check(state)
    _same_operators(state["operators"], descriptions(pipeline))
    own = {each.name: state[each.name] for each in fields(Position)}
    own["marks"] = {place: Mark(**mark) for place, mark in state["marks"].items()}
    own["heads"] = None if state["heads"] is None else Heads(*state["heads"])
    position = Position(**own)
    for name, given_value, meant in (
        ("epoch", epoch, position.epoch),
        ("seed", seed, position.seed),
    ):
        if given_value is not None and given_value != meant:
            raise StateError(
                f"{name}: the state is of {name} {meant}, and the run has {name}={given_value}; "
                f"omit {name}= to resume"
            )
    if not any_ranks:
        ranks, rank = shares_of(pipeline)
        _same_ranks(position, ranks)
        if (position.ranks, position.rank) != (ranks, rank):
            position = replace(position, ranks=ranks, rank=rank)
    given, raised = position.given, position.raised
    if raised > given:
        raise StateError(f"raised: {raised} errors among given={given} items; the state is damaged")
    length = pipeline.length if _counted(pipeline) else None
    # An error may be among the items that a step counts, as those that `skip` skips.
    if length is not None and length != INFINITE and not raised and given > length:
        raise StateError(
            f"given: the state is after item {given}, and this pipeline gives {int(length)}; the data "
            "must be those that it was taken of"
        )
    return position


def _counted(pipeline: Chain) -> bool:
    """Return True if the length of a pipeline is that of datasets, the same in every epoch.

    A sampler's may be that of the epoch that was set, and that of an iterable a guess.
    """
    branches = pipeline.operators[0].branches()
    return all(map(_counted, branches)) if branches else pipeline.operators[0].counted


def _same_ranks(position: Position, ours: list[int]) -> None:
    """Raise `StateError` for another number of ranks, unless all ranks have come to the same place.

    They have where each step makes one item of one, or of as many as the others: where nothing but the
    sources has left a mark.
    """
    if position.ranks == ours or position.finished or not position.given:
        return
    if all(
        place.endswith(":0") and (mark.value is None or isinstance(mark.value, dict)) and mark.at
        for place, mark in position.marks.items()
    ):
        return
    raise StateError(
        f"ranks: the state is of {position.ranks} ranks and this pipeline is for {ours}; its steps do "
        "not make one item of one, or an error was raised, so each rank is at another position in "
        "the data. Resume on as many ranks, at the end of an epoch, or, if merge_states takes its "
        "steps, from one state of all ranks"
    )


def _same_operators(theirs: list[str], ours: list[str]) -> None:
    for number in range(max(len(theirs), len(ours))):
        his = theirs[number] if number < len(theirs) else "nothing more"
        own = ours[number] if number < len(ours) else "nothing more"
        if his != own:
            raise StateError(
                f"operators: number {number} is {his!r:.100} in the state and {own!r} in this "
                "pipeline; make the pipeline as it was made when the state was taken"
            )
