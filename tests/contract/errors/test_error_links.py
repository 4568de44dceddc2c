"""Links of errors and warnings: one, in the last line, whatever becomes of the error."""

from __future__ import annotations

from hybridloader.errors import NotReady, SourceError, StateError, StoreError

LINK = "\nSee: hybridloader explain "


def test_the_text_ends_with_the_link_and_the_arguments_lack_it() -> None:
    error = SourceError("a.tar is damaged")
    assert str(error) == f"a.tar is damaged{LINK}sourceerror"
    assert error.args == ("a.tar is damaged",)
    assert LINK not in repr(error)
    assert str(StoreError(5, "no answer", "a.tar")).endswith(f"'a.tar'{LINK}storeerror")
    assert str(NotReady("not yet")) == "not yet"


def test_the_link_of_a_quoted_error_is_removed() -> None:
    quoted = SourceError(f"stage 1: {StateError('the state is damaged')}; load another one")
    assert str(quoted) == f"stage 1: the state is damaged; load another one{LINK}sourceerror"
