"""The fake device in a fork of the process that has used it."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from hybridloader.testing import FakeAccelerator


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="processes can't be forked here"
)
def test_a_fork_frees_its_memory_without_the_lock_that_a_thread_had() -> None:
    device = FakeAccelerator()
    held, done = threading.Event(), threading.Event()
    kept = [device._allocate(64, device.new_stream())]

    def hold() -> None:
        with device._lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    child = multiprocessing.get_context("fork").Process(target=kept.clear)
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    done.set()
    holder.join(60)
    child.join(60)
    assert code == 0
    child.close()
