"""A short form of the storms, for every run of the tests; `storm.py` has the long one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from storm import Account, Plan, Weather, ride_out
from support.platforms import FORK

pytestmark = pytest.mark.chaos

SEED = int(os.environ.get("HYBRIDLOADER_CHAOS_SEED", "20261121"))
"""Seed of all storms; it is in every failure's message."""

FORMS = ("loader", "pipeline", "iterable")


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        # A loader starts fresh workers for each epoch, which takes a second.
        pytest.param(backend, form, marks=pytest.mark.full if backend == "spawn" else ())
        for backend in ("inline", "threads", "fork", "spawn", "shared-memory")
        for form in FORMS
    ],
)
def test_each_index_comes_out_exactly_once_whatever_happens(backend: str, form: str) -> None:
    length = 60 if FORK else 20  # a restarted worker imports torch where nothing is forked
    account = ride_out(Weather(SEED, backend, form, length=length, strikes=0.05))
    assert account.faults, f"nothing happened, seed {SEED}"


@pytest.mark.parametrize(
    ("delivered", "skipped", "complaint"),
    [
        ([0, 1], [], "lost"),
        ([0, 1, 2, 2], [], "doubled"),
        ([0, 1, 2], [2], "doubled"),
        ([0, 1], [2], "had nothing"),
    ],
)
def test_the_account_finds_what_was_lost_doubled_or_skipped_for_nothing(
    delivered: list[int], skipped: list[int], complaint: str, tmp_path: Path
) -> None:
    weather = Weather(0, "fork", "pipeline", length=3, share=0.0)
    plan = Plan(weather, tmp_path)
    with pytest.raises(AssertionError, match=complaint):
        Account(delivered, skipped).check(weather, plan)
