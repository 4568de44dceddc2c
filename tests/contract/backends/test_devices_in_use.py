"""Devices in use: no forks then, and their generators stay those of the training code."""

from __future__ import annotations

import pytest
import torch
from support.platforms import needs_fork

from hybridloader import DataLoader, SharedMemory
from hybridloader.engine import Backend, BackendUnavailable

KIND = torch.device("xpu")
"""Any that is not CUDA: none of torch's own is asked here."""


class Module:
    """As `torch.xpu`, or as what a backend from outside of torch has registered."""

    def __init__(self, count: int = 2) -> None:
        self.used = True
        self.states = [torch.tensor([number], dtype=torch.uint8) for number in range(count)]

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, device: int) -> torch.Tensor:
        assert self.used, "asking makes a context"
        return self.states[device]

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state

    def manual_seed_all(self, seed: int) -> None:
        self.states = [torch.tensor([100 + seed % 100], dtype=torch.uint8) for _ in self.states]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: KIND)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def squares() -> list[int]:
    return [number**2 for number in range(4)]


@needs_fork
@pytest.mark.parametrize("backend", ["fork", SharedMemory("fork")])
def test_a_fork_is_refused_after_any_device_was_initialized(
    module: Module, backend: str | Backend
) -> None:
    loader = DataLoader(squares(), num_workers=1, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable, match="after XPU was initialized") as caught:
        iter(loader)
    for way_out in ("threads", "spawn", "before the first use of XPU"):
        assert way_out in str(caught.value)
    module.used = False
    with iter(loader) as iterator:  # type: ignore[attr-defined]
        assert next(iterator).tolist() == [0]


@pytest.mark.parametrize("backend", ["threads", "inline"])
@pytest.mark.parametrize("tells", [True, False], ids=["tells", "can't tell"])
def test_the_generators_of_a_device_in_use_are_put_back_behind_an_init_fn(
    module: Module, monkeypatch: pytest.MonkeyPatch, backend: str, tells: bool
) -> None:
    if not tells:
        monkeypatch.setattr(Module, "is_initialized", None)
    seen: list[int] = []

    def init(worker: int) -> None:
        module.manual_seed_all(worker)
        seen.extend(int(state) for state in module.states)

    loader = DataLoader(
        squares(),  # type: ignore[arg-type]
        num_workers=2,
        backend=backend,
        worker_init_fn=init,
    )
    assert [int(batch) for batch in loader] == squares()
    assert sorted(seen) == [100, 100, 101, 101]
    assert [int(state) for state in module.states] == [0, 1]
