"""One state of those of several ranks, whose pipelines share the indices of a sampler, or shards.

A rank's state names the indices, or samples of shards, that its next items need. Those that all ranks
have left become one order, which any number of ranks share, and every step begins with empty buffers.
Where a rank has given some of the items that a step makes of one index, that index comes first, and the
step withholds these items.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from hybridloader._support.states import set_epoch
from hybridloader._support.user_objects import has
from hybridloader.errors import StateError
from hybridloader.fetching.shards import ShardDivision, names_of, without
from hybridloader.fetching.shards import merged as merged_shards
from hybridloader.running.executor import Offset, generator_of, opening_of
from hybridloader.running.operator import Chain, Mark, Needed
from hybridloader.running.plan import (
    FunctionsNode,
    OperatorNode,
    RelayNode,
    lay_out,
)
from hybridloader.running.state import (
    SOURCES,
    Heads,
    Position,
    RunPosition,
    checked,
    cuts_of,
    descriptions,
    head_place,
    one_by_one,
)

_SAVE = "save the states at another item, or at the end of an epoch"


def merged(chain: Chain, states: Sequence[Any]) -> dict[str, Any]:
    """Return the state from which ranks resume that share the indices which `states` have left.

    See `Pipeline.merge_states`.
    """
    _check(chain)
    ranks = _by_rank([checked(state, chain, any_ranks=True) for state in states])
    some = ranks[0]
    running = [position for position in ranks if not position.finished]
    if len({position.epoch for position in ranks}) > 1:
        raise StateError(
            f"epoch: the ranks are in epochs {sorted({p.next_epoch for p in ranks})}; merge states that "
            "were taken in one epoch"
        )
    if not running or not any(position.begun for position in ranks):
        return some.as_dict(descriptions(chain))
    name, value, lefts = (_shards if _names_shards(chain) else _indices)(chain, ranks)
    places = sorted({left.place for left in lefts if left.had})
    if len(places) > 1:
        _refuse(places[0], f"and {places[1]} have returned a part of an item, on different ranks")
    had = [count for left in lefts for count in left.had]
    made = replace(
        running[0],
        given=0,
        raised=0,
        marks={name: Mark(running[0].epoch, 0, value)},
        rank=[],
        heads=Heads(places[0], had) if had else None,
    )
    return made.as_dict(descriptions(chain))


def _names_shards(chain: Chain) -> bool:
    source = chain.operators[0]
    return source.placement is not None and source.share is not None


def _check(chain: Chain) -> None:
    """Raise `StateError` if ranks share neither indices nor shards, or a step needs its buffer."""
    source, *steps = chain.operators
    if not (_names_shards(chain) or has(getattr(source, "sampler", None), "merge_states")):
        raise StateError(
            f"{source.describe()} does not share its indices among ranks by a sampler that can merge "
            "states, and names no shards; give from_dataset a DistributedShuffleSampler or a "
            "BlockShuffleSampler, or from_iterable a dataset with shard_names and read_shard()"
        )
    for step in steps:
        if not step.begins_anew:
            raise StateError(
                f"{step.describe()} depends on the numbers of its items, or can't begin at any item, so "
                "each rank must resume its own state: use as many ranks, or resume after an epoch"
            )


def _by_rank(positions: list[Position]) -> list[Position]:
    """Return the positions in the order of their ranks. Raises `StateError` if one is missing."""
    count = len(positions)
    for position in positions:
        if position.ranks != [count]:
            raise StateError(
                f"ranks: {count} states were passed, and one of them is of {position.ranks} ranks; pass "
                "those of all ranks"
            )
    found = sorted(rank for position in positions for rank in position.rank)
    if found != list(range(count)):
        raise StateError(f"rank: the states are of the ranks {found}; pass one of each rank")
    return sorted(positions, key=lambda position: position.rank)


class _Left(NamedTuple):
    """Inputs that a rank has left, as numbers counted from the position that `state` is of."""

    state: Mapping[str, Any] | None
    """State of the sampler, or of the shards; None: it has had all indices."""
    first: Sequence[int] = ()  # numbers of those that come first
    rest: int = 0  # number from which on all are left
    had: Sequence[int] = ()
    """How many of the items of each of `first` were had; they are alone there if any were."""
    place: str = ""
    """Name of the node that made these."""


def _indices(chain: Chain, ranks: list[Position]) -> tuple[str, Any, list[_Left]]:
    """Return the name and value of the mark of a sampler, and which indices each rank has left."""
    sampler: Any = getattr(chain.operators[0], "sampler")  # noqa: B009  # of one class of operators
    lefts = [_left(chain, sampler, position) for position in ranks]
    value = sampler.merge_states(
        [left.state for left in lefts], [(left.first, left.rest) for left in lefts]
    )
    return SOURCES[0], value, lefts


def _shards(chain: Chain, ranks: list[Position]) -> tuple[str, Any, list[_Left]]:
    """Return the name and value of the mark of readers, and which shards each rank has left."""
    lefts = [_left_of_shards(chain, position) for position in ranks]
    shards = merged_shards([left.state for left in lefts if left.state is not None])
    return SOURCES[1], {"turn": 0, "readers": [], "shards": shards}, lefts


def _left_of_shards(chain: Chain, position: Position) -> _Left:
    """Return which of the shards of a rank are left."""
    read = chain.operators[0]
    mark = None if position.finished else position.marks.get(SOURCES[1])
    if mark is None:
        source = copy.copy(read.step().function)
        set_epoch(source, position.epoch)
        share = position.rank[0], position.ranks[0]
        whole = ShardDivision(names_of(source), share, 1)
        return _Left(whole.state(None if position.finished else [whole.beginning(0)]))
    state, needs = mark.value["shards"], _needs_of(chain, position)
    own, place = _heads_left(position, needs)
    if needs.needed is not None:
        _refuse(read.name, "comes before a step with a buffer, and its shards have no numbers")
    if own and read.placement is not None and read.placement.on_error is not None:
        _refuse(place, "has returned a part of an item, and the source skips items")
    if needs.had and needs.start > mark.at:  # a filter has left out the samples before it
        _refuse(place, "may have returned a part of an item whose position is unknown")
    if needs.had and len(own) > len(state["first"]):
        if mark.value["next"] is None:  # there was none: the last batch was not full
            return _Left(state)
        state = without(state, mark.value["next"])
    return _Left(state, had=own, place=place)


def _heads_left(position: Position, needs: _Needs) -> tuple[Sequence[int], str]:
    """Return how many of the items of the next inputs were had, and the name of the node.

    Of these inputs others had some items when states were merged before.
    """
    heads = position.own_heads[needs.start :]
    own, place = heads, needs.place
    if needs.had:
        own = [max([needs.had, *own[:1]]), *own[1:]]
    if position.heads is not None and heads:
        if place and place != position.heads.place:
            _refuse(
                place, "and another step have each returned a part of their results of one item"
            )
        place = position.heads.place
    return own, place


def _left(chain: Chain, sampler: Any, position: Position) -> _Left:
    """Return which indices a rank has left."""
    mark = position.marks.get(SOURCES[0])
    if position.finished or (mark is not None and mark.value is None):
        return _Left(None)
    if mark is None:  # nothing of the epoch was asked for
        sampler = copy.copy(sampler)
        sampler.set_epoch(position.epoch)
        return _Left(sampler.state_dict())
    needs = _needs_of(chain, position)
    own, place = _heads_left(position, needs)
    since = needs.start - mark.at  # 0, but for a source that was not opened
    # After the last index, an index that was returned in part looks like none.
    steps = sampler.steps_after(mark.value, position.ranks[0], position.rank[0])
    own = own[: max(0, steps - since)]
    if not own:
        early = () if needs.needed is None else needs.needed.numbers
        rest = needs.start if needs.needed is None else needs.needed.until
        return _Left(mark.value, [number - mark.at for number in sorted(early)], rest - mark.at)
    if needs.needed is not None:
        _refuse(place, "comes before a step with a buffer")
    numbers = range(since, since + len(own))
    return _Left(mark.value, numbers, since + len(own), own, place)


def _refuse(name: str, why: str) -> NoReturn:
    raise StateError(f"step {name!r} {why}, so no other rank can resume there; {_SAVE}")


class _Needs(NamedTuple):
    """Inputs that the next items of a run need."""

    start: int  # number of the first one that the source gives
    needed: Needed | None = None  # which of these a step with a buffer needs; None: all
    slack: int = 0
    """Number of inputs before it that need not be there, as a batch was the last and not full."""
    had: int = 0  # items that were had of the first
    place: str = ""
    """Name of the node that made them."""


def _needs_of(chain: Chain, position: Position) -> _Needs:
    """Go back from the items that were given, as a run does that resumes."""
    plan = lay_out(chain, cuts_of(position.marks))
    epoch, raised = position.epoch, bool(position.raised)
    run, found = RunPosition(plan, epoch, position), _Needs(position.given)
    for node in reversed(plan.nodes[1:]):
        # A step without results begins again; for a part of one, the input must be found.
        if isinstance(node, RelayNode) or not (found.start or found.had):
            continue
        had, slack, needed = 0, 0, None
        if isinstance(node, FunctionsNode):
            if one_by_one(node, raised=raised):
                continue
            point = run.point(node, found.start, epoch)
            if point is None:
                _refuse(node.name, "would run from the beginning of the epoch")
            had, start = found.start - point.given, point.taken
        else:
            saved = run.saved(node, epoch)
            opening = opening_of(node, Offset(found.start, found.slack), epoch, saved, raised)
            if not opening.parts:
                _refuse(node.name, "would run from the beginning of the epoch")
            start, slack = opening.parts[0].start, opening.first.slack
            had = found.start - opening.begins.items
            if opening.marked and saved is not None:
                random = partial(generator_of, node, plan, epoch, position.seed)
                context: Any = SimpleNamespace(  # the part of a context that it asks
                    saved=saved, start=saved.at, epoch=epoch, random=random
                )
                needed = node.operator.needed(context)
        if found.needed is not None:
            _refuse(node.name, "does not make one item of each, before a step with a buffer")
        if found.had and isinstance(node, OperatorNode):
            _refuse(found.place, "has returned a part of its results of a batch or a shuffled item")
        place = head_place(node)
        if had > found.slack or (had and place is not None):  # else all items have come
            if found.had or place is None:
                _refuse(found.place or node.name, "has returned a part of its results of one item")
        else:
            had, place = found.had, found.place
        found = _Needs(start, needed, slack, had, place)
    return found
