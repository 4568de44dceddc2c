"""`Finder`: the intervals that numbers lie in."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridloader.sources.parquet import Finder

sizes = st.lists(st.integers(1, 40) | st.integers(1, 10**9), min_size=1, max_size=40)


@given(sizes, st.data())
def test_numbers_in_any_order_are_found_as_by_a_search(
    sizes: list[int], data: st.DataObject
) -> None:
    stops = np.cumsum(sizes)
    edges = st.sampled_from([0, *(stops - 1).tolist(), *stops[:-1].tolist()])
    numbers = np.array(data.draw(st.lists(st.integers(0, int(stops[-1]) - 1) | edges)), np.int64)
    found = Finder(stops).find(numbers)
    assert found.tolist() == np.searchsorted(stops, numbers, "right").tolist()


def test_one_large_interval_among_many_small_ones_and_none_at_all() -> None:
    stops = np.cumsum([1] * 1000 + [10**12] + [1] * 1000)
    numbers = np.array([0, 999, 1000, 10**12, *(stops[-3:] - 1)])
    assert Finder(stops).find(numbers).tolist() == [0, 999, 1000, 1000, 1998, 1999, 2000]
    assert Finder(np.zeros(0, np.int64)).find(np.zeros(0, np.int64)).tolist() == []
