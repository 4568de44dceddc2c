"""Naming a device: which ones are found, and which are refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator

from hybridloader import DataLoader, Transfer


def first_batch_on(device: Any) -> Any:
    dataset: Any = range(4)
    return next(iter(DataLoader(dataset, 2, device=device)))


def test_a_device_that_is_not_there_or_none_is_refused_in_words() -> None:
    with pytest.raises(
        ValueError, match=r"device='cuad' is not a device: Expected one of cpu, cuda"
    ):
        first_batch_on("cuad")
    for wrong in (3, []):
        with pytest.raises(TypeError, match="device must be a str such as 'cuda'"):
            first_batch_on(wrong)
    if not torch.accelerator.is_available():
        with pytest.raises(
            ValueError, match=r"device='cuda' is not available: torch .* no accelerator"
        ):
            first_batch_on("cuda")
        with pytest.raises(ValueError, match="is not available"):
            first_batch_on(torch.device("cuda", 7))


def test_one_number_too_many_or_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    # Nothing may be initialized by asking: workers may still have to be forked.
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1 / 0)
    with pytest.raises(ValueError, match=r"'cuda:7' is not available: of 'cuda' devices .* sees 2"):
        first_batch_on("cuda:7")
    for other in ("xpu", "meta"):
        with pytest.raises(ValueError, match=r"the accelerator that torch .* is 'cuda'"):
            first_batch_on(other)


def test_the_cpu_is_no_accelerator_and_an_accelerator_stands_for_itself() -> None:
    for cpu in ("cpu", torch.device("cpu", 0), None):
        assert first_batch_on(cpu).device.type == "cpu"
    fake = FakeAccelerator("fake:1", manual=False)
    assert fake.holds(first_batch_on(fake))
    assert fake.holds(first_batch_on(Transfer(fake, batches_ahead=5)))


def test_a_transfer_says_what_may_wait() -> None:
    fake = FakeAccelerator()
    for options in ({"batches_ahead": 0}, {"buffer_bytes": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            Transfer(fake, **options)
    for wrong in (1.5, "2", True, None):
        with pytest.raises(TypeError, match="batches_ahead must be a whole number"):
            Transfer(fake, batches_ahead=wrong)  # type: ignore[arg-type]
