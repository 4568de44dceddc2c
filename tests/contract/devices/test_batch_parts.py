"""Containers of a batch are taken apart and rebuilt as torch's `pin_memory` does it."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_accelerator import FakeAccelerator, taken_for_current
from support.pinning_datasets import Leaf
from support.scripts import no_deadline
from torch.utils.data._utils.pin_memory import pin_memory as torchs_pin_memory

from hybridloader import DataLoader

# torch looks for an accelerator of its own.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no acc")


class Pair(NamedTuple):
    one: Any
    two: Any


class Frozen(Mapping[str, Any]):
    def __init__(self, items: Any) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Stubborn(Frozen):
    """Can't be made of a dict."""

    def __init__(self, items: Any, more: int) -> None:
        super().__init__(items)


class Seq(Sequence[Any]):
    def __init__(self, parts: Any) -> None:
        self.parts = tuple(parts)

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)


class Tagged(dict[str, Any]):
    """Has more than its items."""


def tagged(parts: dict[str, Any]) -> Tagged:
    made = Tagged(parts)
    made.tag = "kept"  # type: ignore[attr-defined]
    return made


leaves = st.one_of(
    st.builds(Leaf, st.integers()),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.none(),
    st.builds(range, st.integers(0, 3)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts, named = (
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    )
    return st.one_of(
        parts,
        parts.map(tuple),
        parts.map(Seq),
        parts.map(collections.UserList),
        parts.map(collections.deque),
        st.builds(Pair, inner, inner),
        named,
        named.map(Frozen),
        named.map(tagged),
        named.map(lambda parts: Stubborn(parts, 1)),
        named.map(types.MappingProxyType),
        named.map(collections.OrderedDict),
    )


OF_TUPLES = type(torchs_pin_memory(()))
"""Type that torch pins tuples into: 2.9 and before made lists of them, where ours remain tuples."""


def parts_of(data: Any) -> Any:
    """Return the comparable parts of `data`."""
    if isinstance(data, Leaf):
        return data
    extra = getattr(data, "tag", None)
    if isinstance(data, Mapping):
        return type(data), extra, {key: parts_of(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        plain = isinstance(data, tuple) and not hasattr(data, "_fields")
        return OF_TUPLES if plain else type(data), [parts_of(value) for value in data]
    return type(data), data


def ours(data: Any) -> Any:
    """`data` as a loader pins it that collates nothing."""
    dataset: Any = [data]
    with taken_for_current(FakeAccelerator(manual=False)):
        return next(iter(DataLoader(dataset, None, collate_fn=lambda one: one, pin_memory=True)))


@no_deadline
@given(st.recursive(leaves, containers, max_leaves=8))
def test_containers_are_taken_apart_and_rebuilt_as_torch_does_it(data: Any) -> None:
    before = parts_of(data)
    assert parts_of(ours(data)) == parts_of(torchs_pin_memory(data))
    assert parts_of(data) == before


def test_a_counter_is_not_added_to_itself() -> None:
    counted = collections.Counter(a=2, b=3)
    assert ours([counted]) == [counted]
    assert counted == collections.Counter(a=2, b=3)


@dataclass(frozen=True)
class Sample:
    image: Any
    label: int
    name: str = "n"
    made: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.made.append(1)


def test_dataclasses_are_looked_into_and_not_constructed_again() -> None:
    sample = Sample([Leaf(1)], 3)
    pinned = ours(sample)
    assert type(pinned) is Sample
    assert pinned.image[0].pinned == 1
    assert (pinned.label, pinned.name, pinned.made) == (3, "n", [1])
    assert sample.image[0].pinned == 0

    @dataclass
    class Plain:
        name: str

    plain = Plain("a")
    assert ours(plain) is plain, "without anything to pin it stays itself"
