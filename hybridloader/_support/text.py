"""Words for people: short forms of values, tables, units, warnings, checks of arguments, the log."""

from __future__ import annotations

import contextlib
import functools
import numbers
import operator
import os
import reprlib
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from hybridloader.errors import linked

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = 8
_short.maxother = _short.maxstring = 120

brief = _short.repr  # function: the repr of a value, cut where it is long

_cell = reprlib.Repr()
_cell.maxother = _cell.maxstring = 60

cell = _cell.repr  # shorter form, for the cell of a table, or one of several values


def short(value: Any) -> str:
    """Return the repr of `value`, cut where it is long, and its type."""
    return f"{brief(value)} (a {type(value).__qualname__})"


def beginning(text: str, longest: int = 80) -> str:
    """Return a text, cut where it is longer than that many characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def first_few(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def table(
    rows: Sequence[Sequence[str]], left: Collection[int] = (0, 1), *, underlined: bool = True
) -> list[str]:
    """Return rows as lines, a heading first; the columns in `left` are to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if underlined:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


class Shown:
    """Result that IPython and notebooks show as it is printed."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def time(seconds: float) -> str:
    """Return a time with a unit that fits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """Return a number of bytes with a unit that fits."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


# -- warnings at the user's line: the first up the stack that is neither ours nor torch's loader's

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BACKENDS = os.path.join(os.path.dirname(os.path.dirname(_OURS)), "backends") + os.sep
"""Next to the package in a checkout, within it in an installation."""
_TORCHS = os.path.join("torch", "utils", "data") + os.sep
_BETWEEN = (functools.__file__, contextlib.__file__)  # whose frames are between those of ours


def warn(message: str, anchor: str) -> None:
    """Warn at the line that called this package, with a link to the troubleshooting page."""
    warnings.warn(linked(message, anchor), stacklevel=_stacklevel())


warn_once = functools.lru_cache(maxsize=256)(warn)
"""Warn at that line, once in a process for each message."""


def _stacklevel() -> int:
    """Return the `stacklevel` to pass to `warnings.warn`.

    Python 3.12 has `skip_file_prefixes` for this; we serve 3.10.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _within(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _within(path: str) -> bool:
    return path.startswith((_OURS, _BACKENDS)) or _TORCHS in path or path in _BETWEEN


# -- the log of rare events: starts, ends and deaths of workers, restarts, fallbacks and resumes

DEBUG, INFO = 10, 20  # levels, as in `logging`


def log(level: int, message: str, *arguments: object) -> None:
    """Log `message`, into which `logging` puts the arguments by ``%``.

    The logger is ``hybridloader``; its messages are DEBUG and INFO, so nothing is printed unless the
    program configures `logging`. A program that has not imported `logging` gets no message, and this
    module does not import it: a worker may need neither.
    """
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        logging.getLogger("hybridloader").log(level, message, *arguments)


# -- Checks of arguments where the user passes them: the error names the argument and the valid values.
#
# Nothing is rounded, clipped or guessed, and nothing is imported to check a value.


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


def keywords(
    caller: str, given: Collection[str], known: Collection[str], own: Collection[str] = ()
) -> None:
    """Refuse keywords that are not `known`. Raises `TypeError`, which also lists `own` parameters."""
    if unknown := sorted({*given} - {*known}):
        names = [*own, *known]
        raise TypeError(
            f"{caller} got an unexpected keyword {unknown[0]!r}; {meant(unknown[0], names)}there are: "
            f"{', '.join(names)}"
        )


def meant(word: str, known: Collection[str]) -> str:
    """Return ``"did you mean 'x'? "`` if a known word is like `word`, or else an empty text."""
    from difflib import get_close_matches  # only for errors

    close = get_close_matches(word, known, 1)
    return f"did you mean {close[0]!r}? " if close else ""


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
