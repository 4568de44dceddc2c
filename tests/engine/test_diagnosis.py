"""The words of errors about workers: what happened, where, what to try."""

from __future__ import annotations

from typing import Any

import pytest

from hybridloader.engine.messages import Exited
from hybridloader.engine.scheduler import Fault
from hybridloader.engine.stage import death, given_up, overrun, sample_at

WORKER = "worker 1 (process, pid 4711)"


def fault(signal: str, *in_flight: int, **known: Any) -> Fault:
    cause = f"was killed by signal {signal}"
    return Fault(1, cause, in_flight, Exited(1, cause, **known))


def test_a_death_is_told_as_ever_without_more() -> None:
    text = death("load", WORKER, fault("SIGTERM (15)", 3, 4), {3: [1, 2], 4: [3]})
    assert text == (
        f"In stage 'load', {WORKER} was killed by signal SIGTERM (15). It was to fetch [1, 2]; [3]."
    )


def test_a_death_with_all_that_can_be_known() -> None:
    text = death(
        "load",
        WORKER,
        fault(
            "SIGSEGV (11)",
            *(3, 4),
            task=4,
            at=1,
            evidence="Fatal Python error\n  File\n",
            slots=(1_000, 20_000),
        ),
        {3: [1, 2], 4: [30, 31]},
        refusal="No more may be replaced.",
    )
    first, *evidence = text.splitlines()
    for words in (
        "It was at sample 1 of [30, 31]: 31.",
        "No more may be replaced.",
        "Native code crashed",
        "Its slots took 1,000 of 20,000 bytes.",
    ):
        assert words in first
    assert evidence == ["Fatal Python error", "  File"]


@pytest.mark.parametrize(("task", "at"), [(None, 1), (3, None), (3, -1), (9, 1)])
def test_a_sample_that_is_not_known_is_not_told(task: int | None, at: int | None) -> None:
    text = death("load", WORKER, fault("SIGTERM (15)", 3, task=task, at=at), {3: [1, 2]})
    assert "sample" not in text


def test_what_the_kernel_says_takes_the_place_of_a_guess() -> None:
    guess = death("load", WORKER, fault("SIGKILL (9)", 3), {3: [1]})
    assert "Likely the system ran out of memory, or a person or another program killed it" in guess
    known = death("load", WORKER, fault("SIGKILL (9)", 3, memory="Likely cause: OOM."), {3: [1]})
    assert "Likely the system" not in known
    assert "backend='threads'" not in known, "its report has the advice"
    assert known.endswith("\nLikely cause: OOM.")


def test_a_bus_error_is_explained_by_memory_alone_if_it_is_known() -> None:
    guess = death("load", WORKER, fault("SIGBUS (7)"), {})
    assert "It had no task." in guess
    assert "shared-memory mount" in guess
    known = death("load", WORKER, fault("SIGBUS (7)", memory="/dev/shm is full."), {})
    assert "shared-memory mount" not in known
    assert known.endswith("\n/dev/shm is full.")


@pytest.mark.parametrize("signal", ["SIGSEGV (11)", "SIGABRT (6)", "SIGFPE (8)", "SIGILL (4)"])
def test_every_crash_comes_with_something_to_try_or_to_know(signal: str) -> None:
    assert "Native code" in death("load", WORKER, fault(signal), {})


def test_a_sample_outside_of_a_list_is_told_by_its_number() -> None:
    assert sample_at({"a": 1}, 2) == "It was at sample 2 of {'a': 1}."
    assert sample_at([5], 2) == "It was at sample 2 of [5]."
    assert sample_at((5, 6), 0) == "It was at sample 0 of (5, 6): 5."


def test_a_task_that_ran_over() -> None:
    text = overrun("load", WORKER, [7, 8], 12.34, 10, stack="The thread\n  File\n")
    first, *stack = text.splitlines()
    assert first.startswith(
        f"In stage 'load', {WORKER} has been at [7, 8] for 12.3 s, longer than task_timeout=10 seconds."
    )
    assert "on_worker_death='restart'" in first
    assert "raise task_timeout" in first
    assert stack == ["The thread", "  File"]


def test_a_thread_that_ran_over_can_not_be_killed() -> None:
    text = overrun("load", "worker 0 (thread, pid 1)", [7], 61, 60, thread=True)
    assert "can't be killed" in text
    assert "was killed" not in text
    assert "'fork'" in text
    assert text.count("\n") == 0


def test_a_sample_that_kills_again_and_again() -> None:
    cause = "was killed by signal SIGABRT (6)"
    text = given_up("load", WORKER, 2, cause, at=0)
    assert text.startswith("In stage 'load', 2 workers died at this sample, so it was given up")
    assert f"the last one, {WORKER}, {cause}." in text
    assert "Native code" in text
    assert "1 worker died at a task that contains this sample" in given_up("load", WORKER, 1, cause)
