"""The gate that tests of workers wait at."""

from __future__ import annotations

import threading

from support.forking import in_a_fork
from support.platforms import needs_fork

from hybridloader.testing import Gate


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
