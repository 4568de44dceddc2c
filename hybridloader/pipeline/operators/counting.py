"""Check that items of a pipeline keep their numbers when one of them fails, as a `zip` needs.

A step that gives one item, or one error, for each item that it takes keeps count. A step that makes
several items of one, or one of several, loses count at the first failure: that is not one item.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridloader.fetching.on_error.policies import Skip, final
from hybridloader.pipeline.operators.base import Chain, Operator, steps_in
from hybridloader.pipeline.operators.cache import Cache
from hybridloader.pipeline.operators.order import Repeat, ShardByRank, SkipFirst, Take
from hybridloader.pipeline.operators.work import Lookup, Map, Placed, Readers


def loses_count(pipeline: Chain) -> str | None:
    """Name a step after which the number of a failed item is unknown; None if there is none."""
    return next((operator.name for operator in steps_in(pipeline) if not _counts(operator)), None)


def leaves_out(pipelines: Sequence[Chain]) -> bool:
    """Tell whether a step in one of `pipelines` leaves out items that fail."""
    return any(_skips(operator) for pipeline in pipelines for operator in steps_in(pipeline))


def check(name: str, number: int, pipeline: Chain) -> None:
    """Raise `ValueError` for a pipeline that leaves items out by policy and loses count of them."""
    skipping: str | None = None
    for operator in steps_in(pipeline):
        culprit = None
        if _skips(operator):
            skipping = operator.name
            if not _leaves_a_gap(operator):
                culprit = f"{skipping} makes no one item of one"
        elif skipping is not None and (isinstance(operator, Cache) or not _counts(operator)):
            culprit = f"behind {operator.name} nobody knows which item that was"
        if culprit is not None:
            raise ValueError(
                f"{name}: in pipeline {number}, {skipping} leaves out items that fail, and {culprit}: "
                "all rows behind it would be joined wrongly. Put the step with on_error, or those "
                "behind it, behind the zip; or give on_error=Replace(...), which keeps every place"
            )


def _skips(operator: Operator) -> bool:
    if not isinstance(operator, Placed):
        return False
    return isinstance(final(operator.placement.on_error), Skip)


def _leaves_a_gap(operator: Operator) -> bool:
    if isinstance(operator, Lookup):
        return not operator.function.batched  # of a batch, one sample fails and the rest stays
    return isinstance(operator, (Map, Readers))


def _counts(operator: Operator) -> bool:
    """Tell whether it gives one item or error for each it takes, or knows how many it omits."""
    if isinstance(operator, (Map, Readers, Take, SkipFirst, ShardByRank, Repeat, Cache)):
        return True
    if operator.branches():  # they are looked at themselves
        return True
    return operator.seek(1) == 1 and operator.seek(2) == 2
