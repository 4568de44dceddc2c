"""accelerate leaves a `PipelineLoader` alone in `prepare`, and saves what is registered with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_loaders import counted, numbers, uncounted, whole
from support.seeded_training import Regression

from hybridloader import PipelineLoader

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

EPOCHS = 3


class Training:
    """A training loop as accelerate's users write it; `seen` are the samples of its batches."""

    def __init__(self, loader: PipelineLoader) -> None:
        self.accelerator, regression = Accelerator(cpu=True), Regression()
        self.model, self.optimizer, prepared = self.accelerator.prepare(
            regression.model, regression.optimizer, loader
        )
        assert prepared is loader
        self.loader = loader
        self.accelerator.register_for_checkpointing(loader)
        self.seen: list[Any] = []

    def epoch(self, stop: int | None = None) -> None:
        for batch in self.loader:
            features, target = batch
            loss = torch.nn.functional.mse_loss(self.model(features).squeeze(1), target)
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.seen.append([*numbers(batch), loss.item()])
            if len(self.seen) == stop:
                return


@pytest.mark.parametrize("make", [counted, uncounted])
@pytest.mark.parametrize("stop", [3, 7, None])
def test_what_is_registered_resumes_with_the_model(
    make: Any, stop: int | None, tmp_path: Path
) -> None:
    """In the middle of an epoch, or at its end."""
    with make() as loader:
        training = Training(loader)
        training.epoch(stop)
        if stop is not None and stop > 3:
            training.epoch(stop)
        training.accelerator.save_state(str(tmp_path))
        stopped = len(training.seen)
    _fresh()
    with make("fork") as loader:
        resumed = Training(loader)
        resumed.accelerator.load_state(str(tmp_path))
        for _ in range(EPOCHS - loader.state_dict()["epoch"] - loader.state_dict()["finished"]):
            resumed.epoch()
    wanted = whole(make(), EPOCHS)
    assert [batch[:-1] for batch in training.seen + resumed.seen] == wanted
    with make() as loader:
        _fresh()
        unstopped = Training(loader)
        for _ in range(EPOCHS):
            unstopped.epoch()
    assert training.seen == unstopped.seen[:stopped]
    assert resumed.seen == unstopped.seen[stopped:]


def _fresh() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
