"""accelerate: `keep_loaders` changes all that it needs or nothing, and once."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import hybridloader
from hybridloader import DataLoader

pytest.importorskip("accelerate")
import accelerate
from accelerate import data_loader as accelerates
from support.accelerate_loaders import kept_loaders
from support.once import forget_warnings

from hybridloader.integrations.accelerate import keep_loaders

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",  # torchdata's StatefulDataLoader calls it
)


def everything() -> dict[str, Any]:
    """Return all attributes of accelerate's module and of our class that could be changed."""
    found: dict[str, Any] = {"ours": dict(vars(DataLoader))}
    for name, value in vars(accelerates).items():
        if isinstance(value, type) and value.__module__ == accelerates.__name__:
            found[name] = value, dict(vars(value))
        else:
            found[name] = dict(value) if name == "_PYTORCH_DATALOADER_KWARGS" else value
    return found


def test_further_calls_change_nothing() -> None:
    with kept_loaders():
        changed = everything()
        keep_loaders()
        assert everything() == changed


@pytest.mark.parametrize("name", ["_PYTORCH_DATALOADER_KWARGS", "DataLoaderAdapter", "DataLoader"])
def test_a_release_without_what_is_changed_is_refused_and_nothing_is_changed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(accelerates, name)
    before = everything()
    release = accelerate.__version__.replace(".", r"\.")
    with pytest.raises(RuntimeError, match=rf"accelerate {release} is not built as.*{name}"):
        keep_loaders()
    assert everything() == before


@pytest.mark.parametrize("release", ["0.34.2", "99.0.dev0", "unknown"])
def test_an_untested_release_is_warned_of_once_and_both_are_named(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_warnings()
    monkeypatch.setattr(accelerate, "__version__", release)
    says = rf"{hybridloader.__version__} was tested with accelerate [\d. a-z]+, .* {release}"
    with pytest.warns(UserWarning, match=says), kept_loaders():
        pass
    with kept_loaders():
        pass


def test_the_installed_release_is_a_tested_one() -> None:
    forget_warnings()
    with kept_loaders():
        pass


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
