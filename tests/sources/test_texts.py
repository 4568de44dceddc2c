"""Texts as two arrays: a sequence like a list of them, that any process can have."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridloader.sources import files as module
from hybridloader.sources.files import Texts

anything = st.lists(st.text(st.characters(), max_size=5), max_size=9)


@given(anything)
def test_they_are_those_that_were_given(given_texts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", 3)
        texts = pickle.loads(pickle.dumps(Texts(given_texts)))
        count = len(given_texts)
        assert list(texts) == [texts[i] for i in range(count)] == given_texts
        assert [texts[i - count] for i in range(count)] == texts[:] == given_texts
        assert texts[1::2] == given_texts[1::2]
        assert texts == given_texts == texts
        assert texts != [*given_texts, "more"]
        for index in (count, -count - 1):
            with pytest.raises(IndexError, match=f"no text {index} of {count}"):
                texts[index]


def test_names_of_files_that_are_not_utf8_come_back() -> None:
    name = b"\xff.txt".decode("utf-8", "surrogateescape")
    assert Texts([name])[0] == name


def test_they_are_shown_in_short() -> None:
    assert repr(Texts("abcd")) == "Texts(['a', 'b', 'c', ...])"
    other: Any = 3
    assert Texts("a") != other
