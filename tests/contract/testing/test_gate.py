"""The gate that tests of workers wait at."""

from __future__ import annotations

import threading

import pytest
from support.forking import in_a_fork
from support.platforms import needs_fork

from hybridloader import Threads
from hybridloader.testing import BackendContract, Gate


@needs_fork
def test_a_gate_takes_its_own_folder_along_and_lets_those_pass_that_wait_at_it() -> None:
    gate = Gate()
    folder = gate.folder
    late = Gate(folder)  # as a worker has it
    waiting = threading.Thread(target=late.arrive)
    waiting.start()
    gate.await_arrivals()

    def leave() -> None:
        nonlocal gate
        del gate

    assert in_a_fork(leave) == 0
    assert folder.exists()
    del gate, leave
    waiting.join()
    assert not folder.exists()


def test_a_gate_and_a_crew_that_are_waited_for_in_vain_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybridloader.testing.DEADLINE", 0.0)
    gate, contract = Gate(), BackendContract()
    contract.backend = Threads()  # type: ignore[misc]
    for wait, message in (
        (gate.await_arrivals, "no worker came"),
        (gate.arrive, "was never opened"),
    ):
        with pytest.raises(TimeoutError, match=message):
            wait()
    with contract.crew(contract.spec(abs)) as crew, pytest.raises(AssertionError, match="so far: "):
        crew.collect(1)
