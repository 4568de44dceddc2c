"""Checks of arguments where the user passes them: the error names the argument and the valid values.

Nothing is rounded, clipped or guessed, and nothing is imported to check a value.
"""

from __future__ import annotations

import numbers
import operator
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from hybridloader._support.text import short

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def whole(
    name: str, value: Any, least: int | None = None, most: int | None = None, instead: str = ""
) -> int:
    """Return `value` as an int; numpy's integers are accepted, True and False are not.

    Raises `TypeError` for any other type, and `ValueError` below `least` or above `most`. Errors name
    the argument `name`, and end with the advice `instead`.
    """
    hint = f"; {instead}" if instead else ""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {short(value)}{hint}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}{hint}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}{hint}")
    return number


def is_number(value: Any) -> bool:
    """Return True if `value` is a real number and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def seconds(name: str, value: Any, *, above: bool = False) -> None:
    """Check that `value` is a valid timeout, or raise `ValueError`; `above` refuses 0."""
    if not is_number(value) or not (value > 0 if above else value >= 0):  # NaN is neither
        least = "above 0" if above else "0 or more"
        raise ValueError(f"{name} is seconds, {least}, not {short(value)}")
    if value > threading.TIMEOUT_MAX:
        raise ValueError(f"{name}={value!r} is more seconds than Python can wait; 0 waits forever")


def flag(name: str, value: Any) -> bool:
    """Return `value`, a bool of Python or numpy, as Python's bool. Raises `TypeError`."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be True or False, got {short(value)}")
    return bool(value)


def function(name: str, value: Any, what: str) -> None:
    """Check that `value`, described by `what`, can be called. Raises `TypeError`."""
    if not callable(value):
        raise TypeError(f"{name} must be {what}, got {short(value)}")


def one_of(name: str, value: Any, choices: Collection[str]) -> None:
    """Check that `value` is one of `choices`. Raises `ValueError`."""
    if not isinstance(value, str) or value not in choices:
        *most, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {value!r}")


def keywords(caller: str, given: Collection[str], known: Collection[str], before: str = "") -> None:
    """Refuse keywords that `caller` does not have. Raises `TypeError`."""
    if unknown := sorted({*given} - {*known}):
        raise TypeError(
            f"{caller} got an unexpected keyword {unknown[0]!r}; there are: {before}{', '.join(known)}"
        )


def policy(
    name: str,
    value: Any,
    words: Mapping[str, Callable[[], T] | None],
    kinds: tuple[type[T], ...],
    choices: str,
    hint: str = "",
) -> T | None:
    """Return `value` if it is an instance of `kinds`, or the policy that `words` makes from its name.

    Raises `ValueError` with the description `choices` for any other value.
    """
    if isinstance(value, kinds):
        return value
    if isinstance(value, str) and value in words:
        make = words[value]
        return None if make is None else make()
    if isinstance(value, type) and issubclass(value, kinds):
        hint = f"; {value.__name__} is the class, write {value.__name__}(...)"
    raise ValueError(f"{name} must be {choices}, not {value!r}{hint}")


def spelled_out(words: type, defaults: Mapping[str, Any]) -> Callable[[F], F]:
    """Have `help` and editors show the keywords `words`, a `TypedDict`, in the place of ``**words``.

    Type checkers read ``**words: Unpack[Words]`` and need no help. Calls cost nothing: only the
    signature that `inspect` reports is another one.
    """

    # `dataclasses`, which all callers import, has imported it; a worker may not need it.
    import inspect

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *shown, rest = signature.parameters.values()
        assert rest.kind is rest.VAR_KEYWORD
        for name, annotation in words.__annotations__.items():
            text = getattr(annotation, "__forward_arg__", annotation)
            shown.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=text
                )
            )
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate
