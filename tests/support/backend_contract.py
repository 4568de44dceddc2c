"""The contract of a backend, with results that a device reads."""

from __future__ import annotations

import warnings

import hybridloader.testing
from hybridloader.engine import Task
from support.fake_accelerator import FakeAccelerator
from support.locked_slots import PageLocks


class BackendContract(hybridloader.testing.BackendContract):
    """The suite that is published, and two tests of crews that lock pages."""

    def test_memory_is_not_reused_before_a_device_has_read_it_and_no_lock_is_left(self) -> None:
        """A crew that does not lock pages passes as well: the device then reads at once."""
        import torch

        device = FakeAccelerator()
        locks = PageLocks(device)
        copies = []
        with self.crew(self.spec(hybridloader.testing.collated, workers=2), locks) as crew:
            for seq in range(8):
                crew.send(seq % 2, Task(seq, seq))
                [result] = crew.collect(1)
                copies.append(device.move(torch.as_tensor(crew.open(result))))
                del result
                if seq == 5:
                    device.run()
            crew.events.clear()
        device.run()
        for seq, copy in enumerate(copies):
            assert copy.shape == (1, 1 << 19)
            assert copy.min() == copy.max() == seq
        locks.collect()
        assert device.locked == {}

    def test_pages_that_can_not_be_locked_cause_one_warning_and_results_come(self) -> None:
        device = FakeAccelerator(lockable=0)
        with self.crew(self.spec(hybridloader.testing.collated), PageLocks(device)) as crew:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for index in range(4):
                    assert int(crew.open(crew.ask([index])[0])[0][-1]) == index
            assert len([w for w in caught if "not page-locked" in str(w.message)]) <= 1
        assert device.locked == {}
