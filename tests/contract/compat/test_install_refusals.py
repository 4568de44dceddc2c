"""Loaders that `install` leaves to torch, and those with a `multiprocessing_context`."""

from __future__ import annotations

import multiprocessing.context
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.once import forget_warnings
from support.platforms import FORK, needs_fork
from support.sample_origin import PROCESS, THREAD, origin_loader, origins
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from hybridloader import Threads, install
from hybridloader.errors import BackendUnavailable

# -- what ours would refuse ------------------------------------------------------------------------


_CONTEXT: Any = type(multiprocessing.get_context("fork" if FORK else "spawn"))


class _Process(_CONTEXT.Process):  # type: ignore[misc]
    """Somebody's own kind of process."""


class _ForkContext(_CONTEXT):  # type: ignore[misc]
    Process = _Process


class _OddContext(_ForkContext):
    """Context like MONAI's, with an unknown start method."""

    _name = "odd"


class _Unsendable(IterableDataset[int]):
    def __init__(self) -> None:
        self.made = (i for i in range(4))

    def __iter__(self) -> Iterator[int]:
        return self.made


class _Unavailable(Threads):
    def check(self) -> None:
        raise BackendUnavailable("not on a Sunday")


def refused() -> dict[str, tuple[Any, dict[str, Any], Any, str]]:
    """By name: a dataset, what its loader is given, what is installed, and the reason."""
    data = range(4)
    return {
        "an unknown context": (data, {"multiprocessing_context": _OddContext()}, None, "own kind"),
        "... overruled": (data, {"multiprocessing_context": _OddContext()}, "fork", "own kind"),
        "its own processes": (data, {"multiprocessing_context": _ForkContext()}, None, "own kind"),
        "can't be copied": (_Unsendable(), {}, "threads", r"dataset\.made .* can't be copied"),
        "can't be sent": (_Unsendable(), {}, "spawn", r"dataset\.made .* can't be pickled"),
        "no backend here": (data, {"shuffle": True}, _Unavailable(), "not on a Sunday"),
        "an argument": (data, {"in_order": "yes"}, "threads", "in_order must be True or False"),
    }


@pytest.mark.parametrize(
    "case",
    # torch's fresh workers do not get what can't be pickled
    [pytest.param(case, marks=needs_fork if "can't" in case else ()) for case in refused()],
)
def test_a_loader_that_ours_refuses_is_left_to_torchs_and_told_once(case: str) -> None:
    data, given_, backend, reason = refused()[case]

    def drawn_of(data: Any) -> Any:
        torch.manual_seed(4)
        loader: Any = TorchLoader(data, num_workers=1, **given_)
        iterator = iter(loader)
        kind = type(iterator)
        return kind, [batch.tolist() for batch in iterator], torch.rand(1)

    forget_warnings()
    wanted = drawn_of(data)
    with install(backend):
        with pytest.warns(UserWarning, match=reason) as caught:
            assert drawn_of(refused()[case][0]) == wanted
        # Not those of Python 3.12 and later, that torch's loader forks beside threads.
        told = [w for w in caught if w.category is not DeprecationWarning]
        assert [w.filename for w in told] == [__file__]
        assert drawn_of(refused()[case][0]) == wanted


def test_what_the_user_s_own_code_raises_is_raised_and_asked_for_once() -> None:
    asked = []

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            asked.append(1)
            raise TypeError("mine")

    loader: Any = TorchLoader(range(2), None, sampler=Sampler(), num_workers=1)  # type: ignore[arg-type]
    with install("threads"), pytest.raises(TypeError, match="mine"):
        iter(loader)
    assert asked == [1]


# -- multiprocessing_context -----------------------------------------------------------------------


def test_threads_come_before_a_context_of_the_loader() -> None:
    with install("threads"):
        assert origins(origin_loader(1, multiprocessing_context="fork")) == THREAD


@needs_fork
def test_a_context_that_is_overruled_is_told_once() -> None:
    loader = origin_loader(1, multiprocessing_context="spawn")
    forget_warnings()
    with install("fork"):
        with pytest.warns(UserWarning, match="multiprocessing_context='spawn'") as caught:
            list(loader)
        assert origins(loader) == PROCESS
    assert "install('shared-memory')" in str(caught[0].message)
    assert caught[0].filename == __file__
