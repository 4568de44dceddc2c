"""Exceptions whose classes can't be asked for anything are worded, annotated, copied and sent."""

from __future__ import annotations

import pickle
import sys

import pytest
from support.hostile_errors import KINDS

from hybridloader._support.user_objects import (
    Failure,
    add_note,
    described,
    foreign,
    repr_of,
    show,
    traceback_of,
    twin,
)

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def raised(kind: type[Exception]) -> Exception:
    try:
        raise kind("bad", 3)  # the line that fails
    except kind as error:
        return error


@every_kind
def test_it_is_worded_and_shown(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    error = raised(kind)
    for text in (described(error), repr_of(error), traceback_of(error)):
        assert kind.__name__ in text
    assert "# the line that fails" in traceback_of(error)
    show(error)
    assert "# the line that fails" in capsys.readouterr().err
    assert isinstance(error, kind)
    assert not isinstance(error, StopIteration)
    assert foreign(error) is error


@every_kind
def test_a_note_is_added_once(kind: type[Exception]) -> None:
    error = raised(kind)
    for note in ("one", "two", "one"):
        add_note(error, note)
    assert error.__dict__["__notes__"] == ["one", "two"]


@every_kind
def test_its_twin_is_another_one_like_it(kind: type[Exception]) -> None:
    error = raised(kind)
    add_note(error, "mine")
    other = twin(error)
    assert type(other) is kind
    assert other is not error
    assert other.args == ("bad", 3)
    assert other.__traceback__ is error.__traceback__
    add_note(other, "its own")
    assert error.__dict__["__notes__"] == ["mine"]


@every_kind
def test_it_comes_with_its_type_and_its_arguments(kind: type[Exception]) -> None:
    failure: Failure = pickle.loads(pickle.dumps(Failure(raised(kind))))
    assert "# the line that fails" in failure.text
    error = failure.to_exception("In a stage.")
    assert type(error) is kind
    assert error.args == ("bad", 3)
    assert error.__dict__["__notes__"] == ["In a stage."]
    assert "# the line that fails" in str(error.__cause__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_a_class_that_lets_no_other_be_made_is_named() -> None:
    error = ExceptionGroup("bad", [ValueError(3)])  # noqa: F821
    error.args = ("no", "longer", "these")
    assert described(twin(error)).startswith("RuntimeError: ExceptionGroup: bad")
