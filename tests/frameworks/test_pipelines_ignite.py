"""ignite: an `Engine` runs a `PipelineLoader`, and both resume from their states."""

from __future__ import annotations

from typing import Any

import pytest
from support.pipeline_loaders import counted, numbers, uncounted, whole

from hybridloader import PipelineLoader

pytest.importorskip("ignite")
from ignite.engine import Engine, Events

EPOCHS = 3


def engine_of(kind: type[Engine], seen: list[Any]) -> Engine:
    return kind(lambda engine, batch: seen.append(numbers(batch)))


def stopped(loader: PipelineLoader, stop: int, seen: list[Any], **options: Any) -> dict[str, Any]:
    """Return the states of engine and loader after so many steps."""
    saved: dict[str, Any] = {}
    engine = engine_of(Engine, seen)

    @engine.on(Events.ITERATION_COMPLETED(once=stop))
    def save(engine: Engine) -> None:
        saved.update(engine=engine.state_dict(), loader=loader.state_dict())
        engine.terminate()

    engine.run(loader, max_epochs=EPOCHS, **options)
    return saved


@pytest.mark.parametrize(("make", "batches"), [(counted, 5), (uncounted, 4)])
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_engine_and_loader_resume_after_any_step(make: Any, batches: int, stop: int) -> None:
    options = {} if make is counted else {"epoch_length": batches}
    seen: list[Any] = []
    with make() as loader:
        saved = stopped(loader, stop, seen, **options)
    with make("fork") as loader:
        loader.load_state_dict(saved["loader"])
        engine = engine_of(Engine, seen)
        engine.load_state_dict(saved["engine"])
        engine.run(loader)
        assert engine.state.iteration == EPOCHS * batches
    assert seen == whole(make(), EPOCHS)
