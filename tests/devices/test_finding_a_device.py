"""Naming a device: which ones are found, and which are refused in words."""

from __future__ import annotations

import pytest
import torch
from support.fake_accelerator import FakeAccelerator, taken_for_current

from hybridloader import Transfer
from hybridloader.devices.pinning import (
    Mover,
    Pinner,
    TorchAccelerator,
    check,
    current,
    find,
    pinner_for,
)


def test_a_device_that_is_not_there_or_none_is_refused_in_words() -> None:
    with pytest.raises(
        ValueError, match=r"device='cuad' is not a device: Expected one of cpu, cuda"
    ):
        find("cuad")
    with pytest.raises(TypeError, match="device must be a str such as 'cuda'"):
        find(3)
    with pytest.raises(TypeError, match="device must be a str"):
        find([])
    if not torch.accelerator.is_available():
        with pytest.raises(
            ValueError, match=r"device='cuda' is not available: torch .* no accelerator"
        ):
            find("cuda")
        with pytest.raises(ValueError, match="is not available"):
            find(torch.device("cuda", 7))


class _Module:
    """Module of a kind of device, with two of them."""

    @staticmethod
    def is_initialized() -> bool:
        return False


def test_one_number_too_many_or_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: _Module)
    with pytest.raises(ValueError, match=r"'cuda:7' is not available: of 'cuda' devices .* sees 2"):
        find("cuda:7")
    with pytest.raises(ValueError, match=r"the accelerator that torch .* is 'cuda'"):
        find("xpu")
    with pytest.raises(ValueError, match=r"the accelerator that torch .* is 'cuda'"):
        find("meta")
    # Nothing may be initialized by asking: workers may still have to be forked.
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1 / 0)
    for device, name in (
        ("cuda:1", "cuda:1"),
        ("cuda", "cuda:0"),
        (torch.device("cuda"), "cuda:0"),
    ):
        found = find(device)
        assert isinstance(found, TorchAccelerator)
        assert found.name == name
    now = current()
    assert now is not None
    assert now.name == "cuda:0"
    monkeypatch.setattr(_Module, "is_initialized", staticmethod(lambda: True))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    now = current()
    assert now is not None
    assert now.name == "cuda:1"


def test_the_cpu_is_no_accelerator_and_none_is_none() -> None:
    assert find("cpu") is find(torch.device("cpu", 0)) is None
    check(None)
    assert pinner_for("cpu", pin_memory=False) is None
    assert pinner_for(None, pin_memory=False) is None


def test_an_accelerator_stands_for_itself() -> None:
    fake = FakeAccelerator("fake:1")
    assert find(fake) is fake
    with taken_for_current(fake):
        pinner = pinner_for(None, pin_memory=True)
        assert type(pinner) is Pinner


def test_a_transfer_says_what_may_wait() -> None:
    fake = FakeAccelerator()
    pinner = pinner_for(Transfer(fake, batches_ahead=5, buffer_bytes=7), pin_memory=True)
    assert type(pinner) is Mover
    assert (pinner.batches_ahead, pinner.buffer_bytes) == (5, 7)
    for options in ({"batches_ahead": 0}, {"buffer_bytes": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            Transfer(fake, **options)
    for wrong in (1.5, "2", True, None):
        with pytest.raises(TypeError, match="batches_ahead must be a whole number"):
            Transfer(fake, batches_ahead=wrong)  # type: ignore[arg-type]
