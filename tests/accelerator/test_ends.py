"""Ends of epochs on a real accelerator: breaks, closes, errors, and workers that die."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_loaders import BACKENDS, loader_of, on_backends
from support.digested_batches import KIND, Noise, busy, digest, wanted


def digests(batches: Any) -> torch.Tensor:
    return torch.cat([digest(batch) for batch in batches]).cpu()


@on_backends
def test_epochs_of_the_same_workers_some_left_early(backend: Any) -> None:
    loader = loader_of(160, backend, device=KIND, persistent_workers=True)
    for epoch in range(4):
        found = []
        for batch in loader:
            busy(0.01)
            found.append(digest(batch))
            if epoch % 2 == 0 and len(found) == 3:
                break
        assert torch.equal(torch.cat(found).cpu(), wanted(8 * len(found)))
        assert len(found) == (20, 3)[epoch % 2 == 0]


@on_backends
def test_a_close_with_copies_and_kernels_queued(backend: Any) -> None:
    for _ in range(3):
        with iter(loader_of(160, backend, device=KIND)) as iterator:  # type: ignore[attr-defined]
            batch = next(iterator)
            busy(0.1)
            found = digest(batch)
            del batch
        assert torch.equal(found.cpu(), wanted(8))


class _Broken(Noise):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 20:
            raise KeyError("of sample 20")
        return super().__getitem__(index)


@on_backends
def test_an_error_of_a_sample_takes_the_place_of_its_batch(backend: Any) -> None:
    iterator = iter(loader_of(64, backend, data=_Broken(64), device=KIND))
    found = [next(iterator), next(iterator)]
    with pytest.raises(KeyError, match="of sample 20"):
        next(iterator)
    found += iterator
    right = wanted(64)
    assert torch.equal(digests(found), torch.cat([right[:16], right[24:]]))


class _Huge:
    """Object that no device has memory for."""

    def to(self, device: Any) -> torch.Tensor:
        return torch.empty(1 << 50, dtype=torch.uint8, device=device)


def _huge_at_the_third(samples: list[torch.Tensor]) -> Any:
    batch = torch.stack(samples)
    right = wanted(24)[16:]
    return _Huge() if torch.equal(digest(batch), right) else batch


def test_a_device_without_memory_is_an_error_in_the_place_of_the_batch() -> None:
    loader = loader_of(64, "threads", device=KIND, collate_fn=_huge_at_the_third)
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]
    with pytest.raises(RuntimeError, match="memory"):
        next(iterator)
    found += iterator
    right = wanted(64)
    assert torch.equal(digests(found), torch.cat([right[:16], right[24:]]))


class _Dying(Noise):
    """Ends its process once, at sample 100."""

    def __init__(self, length: int, marker: Path) -> None:
        super().__init__(length)
        self.marker = marker

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 100 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_batches_from_before_and_after_a_restart_are_right(tmp_path: Path) -> None:
    data = _Dying(400, tmp_path / "died")
    loader = loader_of(
        400, BACKENDS["processes"], data=data, device=KIND, on_worker_death="restart"
    )
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the worker that died
        for number, batch in enumerate(loader):
            if number % 10 == 0:
                busy(0.02)
            found.append(digest(batch))
            del batch
    assert data.marker.exists()
    assert torch.equal(torch.cat(found).cpu(), wanted(400))
