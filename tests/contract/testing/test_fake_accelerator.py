"""The fake device in a fork of the process that has used it."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch
from support.fake_accelerator import FakeAccelerator


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


def test_memory_may_be_freed_in_the_midst_of_a_kernel() -> None:
    """A finalizer runs on any thread at any time, and queues an entry of its own."""
    device = FakeAccelerator()
    tensor, order = device.move(torch.ones(4)), list[str]()
    device.run()
    device.keep_for(tensor, device.current_stream())
    kept = [tensor]
    del tensor

    def kernel() -> None:
        kept.clear()
        order.append("kernel")

    device.manual = False
    device.launch(kernel)
    device.launch(lambda: order.append("next"))
    assert order == ["kernel", "next"]
    assert device.queued == 0


def test_the_host_waits_for_a_mark_and_for_no_later_work() -> None:
    device = FakeAccelerator()
    side = device.new_stream()
    done: list[int] = []
    with device.on(side):
        device.launch(lambda: done.append(1))
    device.hold_up(device.default, device.mark(side))
    device.launch(lambda: done.append(2))
    mark = device.mark(device.default)
    device.launch(lambda: done.append(3))
    device.wait(mark)
    assert done == [1, 2]
