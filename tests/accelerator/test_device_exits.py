"""Processes that use a real accelerator, and end: before, during and after work of the device."""

from __future__ import annotations

import pytest
from support.device_loaders import only_cuda, run


def test_forks_come_before_the_device_is_used_and_the_thread_after_them() -> None:
    run(
        """
        from hybridloader._support.torch_env import device_in_use

        loader = loader_of(64, "fork", persistent_workers=True, device=KIND)
        assert device_in_use() is None, "by the constructor"
        for _ in range(2):
            found = torch.cat([digest(batch) for batch in loader])
            assert torch.equal(found.cpu(), wanted(64))
        """
    )


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_a_process_may_end_in_the_midst_of_it(backend: str) -> None:
    run(
        f"""
        kept = iter(loader_of(400, {backend!r}, device=KIND))
        batch = next(kept)
        """
    )


@pytest.mark.parametrize("option", ["device=KIND", "pin_memory=True"])
def test_a_process_may_end_with_kernels_queued_and_batches_let_go(option: str) -> None:
    run(
        f"""
        for number, batch in enumerate(loader_of(400, "threads", {option})):
            there = batch.to(KIND, non_blocking=True)
            busy(0.2)
            if number == 5:
                break
        """
    )


def test_a_process_may_end_while_the_thread_is_in_a_long_call_of_the_driver() -> None:
    """The part that moves itself is copied from ordinary memory, so its copy waits for the kernels."""
    run(
        """
        from hybridloader.devices.pinning import find

        class Part:
            def record_stream(self, stream): ...
            def to(self, device): return torch.ones(1 << 20).to(device)

        device = find(KIND)
        collate = lambda samples: torch.stack(samples) if samples[0][0] == first else Part()
        first = Noise(1)[0][0]
        kept = iter(loader_of(400, "threads", device=KIND, collate_fn=collate))
        if device.side_stream() is not None:
            with device.on(device.side_stream()):
                busy(5)
        batch = next(kept)
        """
    )


@only_cuda
def test_an_assertion_of_a_kernel_is_raised_and_the_process_ends() -> None:
    run(
        """
        import time

        iterator = iter(loader_of(4000, "threads", device=KIND))
        next(iterator)
        torch.zeros(4, device=KIND)[torch.full((4,), 99, device=KIND)]
        began = time.monotonic()
        try:
            for batch in iterator:
                batch.sum().item()
        except RuntimeError as error:
            assert "CUDA" in str(error), error
        else:
            raise SystemExit("no error")
        assert time.monotonic() - began < 20
        """,
        ignored=True,  # the driver prints each thread that failed
    )
