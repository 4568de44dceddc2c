"""A left-out `backend` starts workers as multiprocessing would: from Python 3.14 on no fork."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from hybridloader import DataLoader

changed = False
"""Set in this process alone: a forked worker inherits it, a fresh one does not."""


class Inherited:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        return changed


@pytest.mark.forkserver
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.full if method == "forkserver" else ())
        for method in multiprocessing.get_all_start_methods()
    ],
)
def test_a_left_out_backend_follows_the_start_method_of_multiprocessing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    monkeypatch.setitem(globals(), "changed", True)
    loader: Any = DataLoader(Inherited(), num_workers=1, collate_fn=list)
    multiprocessing.set_start_method(method, force=True)
    try:
        assert list(loader) == [[method == "fork"]] * 2
    finally:
        multiprocessing.set_start_method(before, force=True)
