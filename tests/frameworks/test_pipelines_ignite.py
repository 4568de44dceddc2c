"""ignite: an `Engine` runs a `PipelineLoader`, and both resume from their states."""

from __future__ import annotations

from typing import Any

import pytest
from support.pipeline_loaders import counted, numbers, uncounted, whole

from hybridloader import PipelineLoader

pytest.importorskip("ignite")
from ignite.engine import Engine, Events
from ignite.engine.deterministic import DeterministicEngine

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


def test_without_a_length_the_engine_learns_it_in_the_first_epoch() -> None:
    seen: list[Any] = []
    with uncounted() as loader:
        saved = stopped(loader, 6, seen)
    with uncounted() as loader:
        loader.load_state_dict(saved["loader"])
        engine = engine_of(Engine, seen)
        engine.load_state_dict(saved["engine"])
        engine.run(loader)
    assert seen == whole(uncounted(), EPOCHS)


def test_a_deterministic_engine_needs_a_length_and_fetches_again_what_was_seen() -> None:
    """So a pipeline, which is deterministic without it, runs in a plain engine."""
    with uncounted("inline") as loader, pytest.raises(TypeError, match="filter"):
        engine_of(DeterministicEngine, []).run(loader, max_epochs=EPOCHS)
    seen: list[Any] = []
    with counted("inline") as loader:
        engine_of(DeterministicEngine, seen).run(loader, max_epochs=EPOCHS)
    assert seen == whole(counted(), EPOCHS)
    with counted("inline") as loader:
        engine = engine_of(DeterministicEngine, seen)
        engine.load_state_dict(
            {"iteration": 7, "epoch_length": 5, "max_epochs": EPOCHS, "rng_states": None}
        )
        engine.run(loader)
    assert seen[15:18] == seen[2:5]  # of epoch 0, where the engine was in epoch 1
