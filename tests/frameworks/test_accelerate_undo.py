"""accelerate: `keep_loaders` changes all that it needs or nothing, and is undone without a trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

import hybridloader
from hybridloader import DataLoader

pytest.importorskip("accelerate")
import accelerate
from accelerate import data_loader as accelerates
from accelerate.state import AcceleratorState, GradientState, PartialState
from support.accelerate_loaders import accelerator, flat, numbers

from hybridloader.integrations import accelerate as integration
from hybridloader.integrations.accelerate import KEY, keep_loaders

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",  # torchdata's StatefulDataLoader calls it
)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """accelerate keeps its state per process; each test begins and ends without any."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def everything() -> dict[str, Any]:
    """Return all attributes of accelerate's module and of our class that could be changed."""
    found: dict[str, Any] = {"ours": dict(vars(DataLoader))}
    for name, value in vars(accelerates).items():
        if isinstance(value, type) and value.__module__ == accelerates.__name__:
            found[name] = value, dict(vars(value))
        else:
            found[name] = dict(value) if name == "_PYTORCH_DATALOADER_KWARGS" else value
    return found


def test_it_is_undone_without_a_trace_and_what_was_prepared_stays_ours() -> None:
    before = everything()
    kept = keep_loaders()
    assert everything() != before
    prepared = accelerator().prepare(numbers())
    kept.undo()
    kept.undo()
    assert everything() == before
    assert flat(prepared) == list(range(20))
    assert type(accelerator().prepare(numbers()).base_dataloader) is TorchLoader


def test_twice_is_harmless_and_the_last_one_undoes_it() -> None:
    before = everything()
    with keep_loaders() as outer:
        changed = everything()
        inner = keep_loaders()
        assert everything() == changed
        outer.undo()
        assert everything() == changed
    assert everything() == changed
    inner.undo()
    assert everything() == before


def test_an_error_within_undoes_it() -> None:
    before = everything()
    with pytest.raises(KeyError), keep_loaders():
        raise KeyError
    assert everything() == before


def _no_table(patch: pytest.MonkeyPatch) -> str:
    patch.delattr(accelerates, "_PYTORCH_DATALOADER_KWARGS")
    return r"_PYTORCH_DATALOADER_KWARGS is not a dict"


def _own_table(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(accelerates._PYTORCH_DATALOADER_KWARGS, KEY, None)
    return rf"has '{KEY}' already"


def _other_name(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(accelerates, "DataLoader", object())
    return r"data_loader\.DataLoader is not torch\.utils\.data\.DataLoader"


def _no_adapter(patch: pytest.MonkeyPatch) -> str:
    patch.delattr(accelerates, "DataLoaderAdapter")
    return r"DataLoaderAdapter\.__init__ is not there"


def _other_function(patch: pytest.MonkeyPatch) -> str:
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader

    patch.setattr(accelerates, "skip_first_batches", skip_first_batches)
    return r"skip_first_batches does not use DataLoader, _PYTORCH_DATALOADER_KWARGS"


def _other_parameters(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(accelerates.DataLoaderShard, "set_epoch", lambda self: None)
    return r"DataLoaderShard\.set_epoch takes \('self',\), not \('self', 'epoch'\)"


def _no_effect(patch: pytest.MonkeyPatch) -> str:
    def init(
        self: Any,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self.base_dataloader = TorchLoader(dataset)
        self.other = lambda: accelerates.DataLoader  # uses the name, to no effect

    patch.setattr(accelerates.DataLoaderAdapter, "__init__", init)
    return r"DataLoaderAdapter made a torch\.utils\.data\.dataloader\.DataLoader"


def _raises(patch: pytest.MonkeyPatch) -> str:
    def init(
        self: Any,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self.base_dataloader = lambda: accelerates.DataLoader
        raise TypeError("nothing")

    patch.setattr(accelerates.DataLoaderAdapter, "__init__", init)
    return r"DataLoaderAdapter raised TypeError: nothing"


@pytest.mark.parametrize(
    "otherwise",
    [
        _no_table,
        _own_table,
        _other_name,
        _no_adapter,
        _other_function,
        _other_parameters,
        _no_effect,
        _raises,
    ],
    ids=lambda function: function.__name__.strip("_"),
)
def test_another_shape_is_refused_and_nothing_is_changed(
    otherwise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = otherwise(monkeypatch)
    before = everything()
    release = accelerate.__version__.replace(".", r"\.")
    with pytest.raises(RuntimeError, match=rf"accelerate {release} is not built as.*{told}"):
        keep_loaders()
    assert everything() == before
    assert KEY not in vars(DataLoader)
    assert not integration._kept
    assert not integration._changes


def test_what_somebody_else_changed_since_is_not_overwritten() -> None:
    kept = keep_loaders()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerates, "DataLoader", TorchLoader)
        changed = everything()
        with pytest.raises(
            RuntimeError, match=r"accelerate\.data_loader\.DataLoader was changed by"
        ):
            kept.undo()
        assert everything() == changed
    kept.undo()
    assert KEY not in vars(DataLoader)


@pytest.mark.parametrize("release", ["0.34.2", "99.0.dev0", "unknown"])
def test_an_untested_release_is_warned_of_once_and_both_are_named(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration._warn_if_untested.cache_clear()
    monkeypatch.setattr(accelerate, "__version__", release)
    tested = "-".join(integration.TESTED)
    told = rf"{hybridloader.__version__} was tested with accelerate {tested}, .* {release}"
    with pytest.warns(UserWarning, match=told) as warned:
        keep_loaders().undo()
    assert warned[0].filename == __file__
    keep_loaders().undo()
    integration._warn_if_untested.cache_clear()


def test_the_installed_release_is_a_tested_one() -> None:
    integration._warn_if_untested.cache_clear()
    keep_loaders().undo()


def test_without_accelerate_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.split(".")[0] == "accelerate":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ImportError, match=r'pip install "accelerate>='):
        keep_loaders()
    assert not integration._kept
