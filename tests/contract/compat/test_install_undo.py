"""``hybridloader.install`` put in and taken out: twice, out of order, by many threads, beside others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from support.sample_origin import PROCESS, THREAD, origin_loader, origins
from torch.utils.data import DataLoader as TorchLoader

from hybridloader import Threads, install, uninstall
from hybridloader.errors import BackendUnavailable

TORCHS = vars(TorchLoader)["_get_iterator"]


# -- in and out ------------------------------------------------------------------------------------


def test_twice_is_an_error_that_says_where_it_was_done_first() -> None:
    first = install("threads")
    line = sys._getframe().f_lineno - 1
    with pytest.raises(RuntimeError, match=r"hybridloader\.uninstall") as caught:
        install("fork")
    assert f"{__file__}:{line}, with backend='threads'" in str(caught.value)
    assert first.active
    assert origins(origin_loader()) == THREAD
    assert repr(first) == f"<Installation backend='threads', active, from {__file__}:{line}>"


def test_it_may_be_undone_any_number_of_times_and_only_by_whoever_did_it() -> None:
    uninstall()
    first = install("threads")
    first.uninstall()
    with install("inline") as second:
        first.uninstall()
        assert second.active
        with pytest.raises(RuntimeError, match="was undone; call install"):
            first.__enter__()
        uninstall()
        assert not second.active
        assert repr(second).startswith("<Installation backend='inline', undone, from ")


def test_a_wrong_value_changes_nothing() -> None:
    keywords = "unexpected keyword 'workers'; there are: backend, threads_"
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("thread", {}, BackendUnavailable, "unknown backend 'thread'"),
        (Threads, {}, TypeError, r"use an instance: Threads\(\)"),
        ("threads", {"workers": 2}, TypeError, keywords),
        ("threads", {"on_error": "ignore"}, ValueError, "on_error must be"),
        ("threads", {"seeding": 3}, ValueError, "SampleSeeding"),
        ("threads", {"on_worker_death": 1}, ValueError, "on_worker_death"),
        ("threads", {"task_timeout": -1}, ValueError, "task_timeout is seconds"),
        ("threads", {"threads_per_worker": 0}, ValueError, "threads_per_worker must be at least 1"),
    ]
    for backend, options, error, says in refused:
        with pytest.raises(error, match=says):
            install(backend, **options)
        assert vars(TorchLoader)["_get_iterator"] is TORCHS
    with pytest.raises(KeyError), install("threads"):
        raise KeyError
    assert vars(TorchLoader)["_get_iterator"] is TORCHS


# -- others who replace the same method ------------------------------------------------------------


def monitored(self: Any) -> Any:
    """Replacement by other code, which calls the method that was there."""
    monitored.calls += 1  # type: ignore[attr-defined]
    return monitored.below(self)  # type: ignore[attr-defined]


@contextlib.contextmanager
def monitoring() -> Iterator[None]:
    vars(monitored).update(calls=0, below=vars(TorchLoader)["_get_iterator"])
    with mock.patch.object(TorchLoader, "_get_iterator", monitored):
        yield


def test_who_came_after_is_not_undone_and_passes_on_to_torch() -> None:
    installed = install("threads")
    with monitoring():
        assert origins(origin_loader()) == THREAD
        installed.uninstall()
        assert vars(TorchLoader)["_get_iterator"] is monitored
        assert origins(origin_loader(1)) == PROCESS
        assert vars(monitored)["calls"] == 2
        with pytest.raises(RuntimeError, match=r"by .*test_install_undo\.monitored already"):
            install("threads")
    assert origins(origin_loader(1)) == PROCESS  # ours is on top again, and has nothing to say
    with install("threads"):
        assert origins(origin_loader()) == THREAD


def test_who_puts_torchs_own_back_has_undone_it() -> None:
    with install("threads"):
        TorchLoader._get_iterator = TORCHS  # type: ignore[method-assign]
        assert origins(origin_loader(1)) == PROCESS
