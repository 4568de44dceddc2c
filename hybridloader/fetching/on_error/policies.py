"""Policies of `on_error`: skip, replace or retry samples that fail.

They are descriptions, compared by value and sent to workers by pickle. They do nothing by themselves:
`ErrorHandler` repeats and replaces in the worker; `ErrorBudget` counts and records where results are
handed out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridloader._support.arguments import function, policy, seconds, whole

LEAST = 1000
"""Least number of samples that a share refers to: otherwise the first bad sample would be 100 %."""

MaxFailures = int | float | None


@dataclass(frozen=True)
class Skip:
    """Leave out samples that fail.

    Parameters
    ----------
    max_failures
        Samples that may be left out in one epoch; one more raises `TooManyErrors`. An int is a number
        of samples. A float above 0 and up to 1 is a share of the samples attempted so far in this
        epoch, which count as 1000 at least. None sets no limit.
    """

    max_failures: MaxFailures = 0.01

    def __post_init__(self) -> None:
        _check_max_failures("Skip", self.max_failures)


@dataclass(frozen=True)
class Replace:
    """Substitute another sample for one that fails.

    Parameters
    ----------
    fn
        Function that returns the other sample, called as ``fn(index, error)`` in the worker where the
        sample failed. Its errors are raised. In a pipeline `index` is the item.
    max_failures
        Samples that may be replaced; see `Skip`.
    """

    fn: Callable[[Any, Exception], Any]
    max_failures: MaxFailures = 0.01

    def __post_init__(self) -> None:
        function("Replace: fn", self.fn, "callable as fn(index, error)")
        _check_max_failures("Replace", self.max_failures)


@dataclass(frozen=True)
class Retry:
    """Fetch a sample that fails again, for errors that pass, such as those of a network.

    Parameters
    ----------
    max_retries
        Number of retries, at least 1.
    backoff
        Seconds before the first retry; the wait doubles with each further one.
    retry_on
        Class, or tuple of classes, of the exceptions to retry after. Any other is left to `then` at
        once.
    then
        Policy after the last retry has failed: ``"raise"``, ``"skip"``, a `Skip` or a `Replace`.
    max_backoff
        Longest single wait, in seconds.
    """

    max_retries: int
    backoff: float = 0.1
    retry_on: type[Exception] | tuple[type[Exception], ...] = (Exception,)
    then: str | Skip | Replace = "raise"
    max_backoff: float = 60.0

    def __post_init__(self) -> None:
        whole("Retry: max_retries", self.max_retries, 1)
        seconds("Retry: backoff", self.backoff)
        seconds("Retry: max_backoff", self.max_backoff)
        kinds: Any = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"Retry: retry_on must be subclasses of Exception, not {kind!r}")
        if not kinds:
            raise ValueError(
                "Retry: retry_on=() retries no error; omit it to retry every Exception"
            )
        if isinstance(self.then, Retry):
            raise ValueError("Retry: then can't be another Retry; raise `max_retries` instead")
        try:
            parse_on_error(self.then)
        except ValueError:
            raise ValueError(
                f'Retry: then must be "raise", "skip", a Skip or a Replace, not {self.then!r}'
            ) from None


Policy = Skip | Retry | Replace


def parse_on_error(value: Any, name: str = "on_error") -> Policy | None:
    """Return the policy that `value` of the parameter `name` is or names; None for ``"raise"``.

    Raises `ValueError` for other values.
    """
    if value is None:
        return None
    choices = '"raise", "skip", a Skip, a Retry or a Replace'
    kinds: tuple[type[Policy], ...] = (Skip, Retry, Replace)
    return policy(name, value, {"raise": None, "skip": Skip}, kinds, choices)


def final(policy: Policy | None) -> Skip | Replace | None:
    """Return the policy for a sample that is not retried any more; None raises."""
    if isinstance(policy, Retry):
        last = parse_on_error(policy.then)
        assert not isinstance(last, Retry)
        return last
    return policy


def _check_max_failures(policy: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{policy}: max_failures must be an int (samples), a float (a share of the samples) or "
            f"None, not {value!r}"
        )
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{policy}: max_failures={value} samples; it must not be negative")
    elif not 0 < value <= 1:  # NaN is neither
        raise ValueError(
            f"{policy}: max_failures={value} is no share: pass a float above 0 and at most 1, or an int "
            "for a number of samples"
        )
