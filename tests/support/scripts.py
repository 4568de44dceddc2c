"""Steps of a pipeline over scripts of items and errors, which they take in the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any

from hypothesis import settings

from hybridloader import Pipeline
from hybridloader.errors import IteratorClosed

no_deadline = settings(deadline=None, max_examples=40)
"""Settings of property tests: no deadline, because a machine may be busy."""

Step = Callable[[Pipeline], Pipeline]


class Oops(Exception):
    """Error that a script raises; equal to another with the same arguments."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Oops and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)


class Script(Iterator[Any]):
    """Gives items and raises those that are exceptions; continues after them. Counts its calls."""

    def __init__(self, *steps: Any) -> None:
        self._steps = iter(steps)
        self.pulled = self.closed = 0

    def __next__(self) -> Any:
        if self.closed:
            raise AssertionError("pulled after it was closed")
        self.pulled += 1
        step = next(self._steps)
        if isinstance(step, BaseException):
            raise step
        return step

    def close(self) -> None:
        self.closed += 1


class _Steps:
    """``steps.batch(2)`` is a function that adds this step to a pipeline."""

    def __getattr__(self, name: str) -> Callable[..., Step]:
        return partial(methodcaller, name)


steps = _Steps()


def scripted(*script: Any) -> Pipeline:
    """Return a pipeline of a length that is not known; each pass gives the script."""
    return Pipeline.from_iterable(lambda: Script(*script))


def begin(step: Step, script: Script, **how: Any) -> Any:
    return step(Pipeline.from_iterable(lambda: script)).run(**how)


def drain(items: Iterator[Any]) -> list[Any]:
    """Return all items, errors in their places; an iterator that ended must stay ended."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(items))
        except StopIteration:
            break
        except IteratorClosed:  # again and again
            raise
        except Exception as error:
            found.append(error)
    for _ in range(2):
        try:
            found.append(next(items))
        except StopIteration:
            continue
        raise AssertionError(f"gave {found[-1]!r} after its end")
    return found


def outcome(step: Step, *script: Any, **how: Any) -> list[Any]:
    return drain(begin(step, Script(*script), **how))


def items_in(outcomes: Any) -> list[Any]:
    return [item for item in outcomes if not isinstance(item, BaseException)]


def errors_in(outcomes: Any) -> list[Any]:
    return [item for item in outcomes if isinstance(item, BaseException)]


class Kept:
    """A pipeline with a cache, of whatever script a pass is given."""

    def __init__(self, path: Any = None, fingerprint: str = "of this") -> None:
        self.script: tuple[Any, ...] | None = None
        self.path = path
        self.pipe = Pipeline.from_iterable(self._begun).cache(
            path, fingerprint=fingerprint if path else None
        )

    def _begun(self) -> Script:
        assert self.script is not None, "opened what comes before"
        return Script(*self.script)

    def begin(self, *script: Any) -> Any:
        self.script = script
        return self.pipe.run()

    def again(self) -> Any:
        self.script = None
        return self.pipe.run()
