"""The state of a run as a dict of what JSON has: how it is written, and how it is checked.

It says where the stream is and what it is a stream of; it holds no item. A state that can't be gone on
from exactly is refused before anything is started, and the error names the field and both values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridloader.errors import StateError
from hybridloader.foreign import attribute
from hybridloader.operators.base import INFINITE, Mark, Operator
from hybridloader.operators.order import Shard
from hybridloader.operators.pin import PinMemory
from hybridloader.operators.sources import Indices
from hybridloader.operators.work import Readers, Work
from hybridloader.running.plan import Prefetch
from hybridloader.states.trail import Counts, Saved

if TYPE_CHECKING:
    from hybridloader.pipeline import Pipeline

VERSION = 1
"""Of the state; it changes with the meaning of a field, and with the order that a seed stands for."""

KIND = "pipeline"

_LONGEST = 80
"""Letters of a description."""


@dataclass(frozen=True)
class Position:
    """What a state says.

    Attributes
    ----------
    seed, seeded
        Of the run, and whether it was given.
    epoch
        Its number.
    counts
        What your loop was given.
    finished
        Whether it had been told that this was all.
    draws
        Seeds of sources, by path; see `Machine.draw`.
    saved
        Marks, by place.
    """

    seed: int
    seeded: bool
    epoch: int
    counts: Counts = Counts()  # noqa: RUF009 - it can't be changed
    finished: bool = False
    draws: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[str, Saved] = field(default_factory=dict)

    def as_dict(self, operators: list[str]) -> dict[str, Any]:
        """The state."""
        return {
            "version": VERSION,
            "kind": KIND,
            "seed": self.seed,
            "seeded": self.seeded,
            "epoch": self.epoch,
            "given": self.counts.given,
            "raised": self.counts.raised,
            "finished": self.finished,
            "operators": list(operators),
            "draws": dict(self.draws),
            "marks": {
                place: {"epoch": saved.epoch, "at": saved.mark.at, "value": saved.mark.value}
                for place, saved in self.saved.items()
            },
        }


_FIELDS = frozenset(Position(0, False, 0).as_dict([]))


def descriptions(pipeline: Pipeline) -> list[str]:
    """What a run must have in common with the one whose state it goes on from: what decides which items
    come in which order, and not where or how fast."""
    return list(_described(pipeline, "", {}))


def _described(pipeline: Pipeline, indent: str, forks: dict[int, int]) -> Iterator[str]:
    for operator in pipeline.operators:
        if isinstance(operator, (Prefetch, PinMemory)):
            continue
        fork: Any = getattr(operator, "fork", None)
        told = _description(operator)
        if fork is not None:
            known = id(fork) in forks
            told = f"{told} of fork {forks.setdefault(id(fork), len(forks))}"
            if known:
                yield f"{indent}{told}"
                continue
        yield f"{indent}{told}"
        for branch in operator.branches():
            yield from _described(branch, indent + "| ", forks)


def _description(operator: Operator) -> str:
    if isinstance(operator, Shard):
        rank, world = operator.resolved()
        return f"shard({rank}, {world})"
    told = operator.describe()
    if isinstance(operator, (Work, Readers)):
        policy = operator.placement.on_error
        if isinstance(operator, Readers):
            told = f"{operator.placement.workers} x {told}"
        if policy is not None:
            told = f"{told} with on_error={policy!r}"
    told = told if len(told) <= _LONGEST else told[: _LONGEST - 3] + "..."
    ranks = _ranks_of(operator) if isinstance(operator, Indices) else None
    return told if ranks is None else f"{told} for {ranks} ranks"


def _ranks_of(source: Indices) -> int | None:
    """How many ranks its sampler shares the indices among, if it tells: ours, torch's."""
    order = source.sampler if source.batch_sampler is None else source.batch_sampler
    for sampler in (order, attribute(order, "sampler")):
        for name in ("world", "num_replicas"):
            ranks = attribute(sampler, name)
            if type(ranks) is int:
                return ranks
    return None


# -- checks ------------------------------------------------------------------------------------------


def checked(
    state: Any, pipeline: Pipeline, *, epoch: int | None = None, seed: int | None = None
) -> Position:
    """What a state says, if `pipeline` can go on from it.

    Parameters
    ----------
    state
        What `state_dict` gave.
    epoch, seed
        What the user says they are; None: what the state says.

    Raises
    ------
    StateError
        It can't.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            f"the state of a run is a dict, not {state!r:.80} ({type(state).__name__})"
        )
    if "version" not in state or "kind" not in state:
        raise StateError(f"this is not the state of a pipeline's run: it has {_names(set(state))}")
    if state["kind"] != KIND:
        raise StateError(f"kind: this is the state of a {state['kind']!r}, and not of a {KIND!r}")
    if type(state["version"]) is not int or state["version"] != VERSION:
        raise StateError(
            f"version: the state has {state['version']!r}, and this hybridloader reads {VERSION}; go on "
            "with the hybridloader that saved it, or begin the epoch anew"
        )
    if missing := _FIELDS.difference(state):
        raise StateError(f"the state lacks {_names(missing)}: was it cut off?")
    if foreign := set(state) - _FIELDS:
        raise StateError(f"the state has {_names(foreign)}, which no state of this version has")
    _same_operators(state["operators"], descriptions(pipeline))
    position = Position(
        seed=_number(state, "seed", None),
        seeded=_flag(state, "seeded"),
        epoch=_number(state, "epoch", 0),
        counts=Counts(_number(state, "given", 0), _number(state, "raised", 0)),
        finished=_flag(state, "finished"),
        draws=_draws(state["draws"]),
        saved=_marks(state["marks"]),
    )
    for name, said, meant in (("epoch", epoch, position.epoch), ("seed", seed, position.seed)):
        if said is not None and said != meant:
            raise StateError(
                f"{name}: the state is of {name} {meant}, and the run is to have {name} {said}; leave "
                f"{name}= out to go on"
            )
    given, raised = position.counts
    if raised > given:
        raise StateError(f"raised: {raised} errors among given={given} items; the state is damaged")
    length = pipeline.length
    if length is not None and length != INFINITE and given - raised > length:
        raise StateError(
            f"given: the state is behind item {given - raised}, and this pipeline gives {int(length)}; "
            "the data must be those that it was taken of"
        )
    return position


def _names(fields: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, fields))) or "nothing"


def _same_operators(theirs: Any, ours: list[str]) -> None:
    if not isinstance(theirs, (list, tuple)):
        raise StateError(f"operators: a list of texts, not {theirs!r:.80}; the state is damaged")
    for number in range(max(len(theirs), len(ours))):
        his = theirs[number] if number < len(theirs) else "nothing more"
        own = ours[number] if number < len(ours) else "nothing more"
        if his != own:
            raise StateError(
                f"operators: number {number} is {his!r:.100} in the state and {own!r} in this "
                "pipeline; make the pipeline as it was made when the state was taken"
            )


def _number(state: Mapping[str, Any], name: str, least: int | None) -> int:
    value = state[name]
    if type(value) is not int or (least is not None and value < least):
        floor = "" if least is None else f" from {least} up"
        raise StateError(f"{name}: a whole number{floor}, not {value!r:.80}; the state is damaged")
    return value


def _flag(state: Mapping[str, Any], name: str) -> bool:
    value = state[name]
    if not isinstance(value, bool):
        raise StateError(f"{name}: True or False, not {value!r:.80}; the state is damaged")
    return value


def _draws(draws: Any) -> dict[str, int]:
    if not isinstance(draws, Mapping):
        raise StateError(f"draws: a dict of numbers, not {draws!r:.80}; the state is damaged")
    for place in draws:
        if type(place) is not str or type(draws[place]) is not int:
            raise StateError(f"draws: {place!r:.80} has no whole number; the state is damaged")
    return dict(draws)


def _marks(marks: Any) -> dict[str, Saved]:
    if not isinstance(marks, Mapping):
        raise StateError(f"marks: a dict, not {marks!r:.80}; the state is damaged")
    found = {}
    for place, mark in marks.items():
        right = isinstance(mark, Mapping) and set(mark) == {"epoch", "at", "value"}
        if not right or type(mark["at"]) is not int or type(mark["epoch"]) is not int:
            raise StateError(f"marks: that of {place!r:.80} is {mark!r:.80}; the state is damaged")
        found[str(place)] = Saved(mark["epoch"], Mark(mark["at"], mark["value"]))
    return found
