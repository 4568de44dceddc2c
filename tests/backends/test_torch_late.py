"""Modules that a worker imports late: seeded, limited and told as if they had been there."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from support.plain_datasets import as_is_everywhere

from hybridloader import DataLoader
from hybridloader._support.torch_env import when_imported

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# -- what comes late -------------------------------------------------------------------------------


def late(dataset: Any, loader_class: Any, **options: Any) -> list[Any]:
    """From the same seeds, with two workers."""
    random.seed(1)
    np.random.seed(1)
    generator = torch.Generator().manual_seed(11)
    return list(
        loader_class(
            dataset,
            None,
            num_workers=2,
            generator=generator,
            collate_fn=as_is_everywhere,
            **options,
        )
    )


def test_torch_that_comes_late_is_seeded_limited_and_told_as_if_it_had_been_there(
    plain: Any,
) -> None:
    dataset = plain.Said("late_torch", 4)
    found = late(dataset, DataLoader, backend="spawn")
    expected = late(dataset, torch.utils.data.DataLoader, multiprocessing_context="fork")
    assert [one.pop("before") for one in found] == [False, False, True, True]
    for one in expected:
        assert one.pop("before")
    assert found == expected
    assert [one["threads"] for one in found] == [1] * 4
    assert found[1]["seed"] == found[0]["seed"] + 1 == found[1]["info"][3]


def test_numpy_that_comes_late_draws_as_in_torchs_workers(plain: Any) -> None:
    dataset = plain.Said("late_numpy", 4)
    found = late(dataset, DataLoader, backend="spawn")
    expected = late(dataset, torch.utils.data.DataLoader, multiprocessing_context="fork")
    assert [one.pop("before") for one in found] == [False, False, True, True]
    for one in expected:
        one.pop("before")
    assert found == expected
    assert found[0]["draws"] != found[1]["draws"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that can be imported; gives its name. The import system is as it was."""
    before, names = list(sys.meta_path), list[str]()
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        name = f"late_module_{len(names)}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield write
    sys.meta_path[:] = before
    for name in names:
        sys.modules.pop(name, None)


def test_what_is_there_already_is_acted_on_at_once_and_once() -> None:
    calls, before = [], list(sys.meta_path)
    when_imported("os", lambda: calls.append(1))
    importlib.reload(importlib.import_module("colorsys"))
    assert calls == [1]
    assert sys.meta_path == before


def test_what_comes_later_is_acted_on_once_after_it_has_run_and_leaves_no_trace(
    module: Any,
) -> None:
    name, calls, before = module("value = 5"), list[Any](), list(sys.meta_path)
    when_imported(name, lambda: calls.append(("first", sys.modules[name].value)))
    when_imported(name, lambda: calls.append(("second", sys.modules[name].value)))
    assert calls == []
    found = importlib.import_module(name)
    assert calls == [("first", 5), ("second", 5)]
    assert sys.meta_path == before
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert found.__spec__ is spec
    assert type(spec.loader).__module__ == "_frozen_importlib_external"
    assert found.__loader__ is spec.loader
    importlib.reload(found)
    del sys.modules[name]
    importlib.import_module(name)
    assert len(calls) == 2


def test_an_act_may_import_the_module_and_sees_it_whole(module: Any) -> None:
    name, calls = module("value = 1\nlast = 2"), list[Any]()
    when_imported(name, lambda: calls.append(importlib.import_module(name).last))
    importlib.import_module(name)
    assert calls == [2]


def test_a_module_imported_by_another_is_acted_on_before_that_one_goes_on(module: Any) -> None:
    inner = module("value = 1")
    outer = module(f"import {inner}\nseen = {inner}.value")
    when_imported(inner, lambda: setattr(sys.modules[inner], "value", 2))
    assert importlib.import_module(outer).seen == 2


def test_an_act_for_one_module_may_wait_for_another(module: Any) -> None:
    one, other, calls = module(""), module(""), list[str]()
    when_imported(one, lambda: when_imported(other, lambda: calls.append("both")))
    importlib.import_module(other)
    assert calls == []
    importlib.import_module(one)
    assert calls == ["both"]


def test_a_module_that_fails_to_import_is_not_acted_on_until_it_succeeds(module: Any) -> None:
    name = module("import os\nif 'HL_TEST_BROKEN' in os.environ: raise KeyError('broken')")
    calls, before = list[int](), list(sys.meta_path)
    when_imported(name, lambda: calls.append(1))
    os.environ["HL_TEST_BROKEN"] = "1"
    try:
        with pytest.raises(KeyError, match="broken"):
            importlib.import_module(name)
    finally:
        del os.environ["HL_TEST_BROKEN"]
    assert calls == []
    importlib.import_module(name)
    assert calls == [1]
    assert sys.meta_path == before


def test_looking_for_a_module_is_not_importing_it(module: Any) -> None:
    name, calls = module(""), list[int]()
    when_imported(name, lambda: calls.append(1))
    assert importlib.util.find_spec(name) is not None
    assert calls == []
    importlib.import_module(name)
    assert calls == [1]


def test_a_module_that_is_not_there_stays_not_there() -> None:
    before = list(sys.meta_path)
    try:
        when_imported("no_module_of_this_name", lambda: None)
        assert importlib.util.find_spec("no_module_of_this_name") is None
        with pytest.raises(ModuleNotFoundError, match="no_module_of_this_name"):
            importlib.import_module("no_module_of_this_name")
    finally:
        sys.meta_path[:] = before


def test_what_an_act_raises_the_import_raises(module: Any) -> None:
    name = module("")
    when_imported(name, lambda: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        importlib.import_module(name)


def test_a_loader_without_attributes_of_its_own_is_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Frozen:
        __slots__ = ()

        def create_module(self, spec: Any) -> None: ...

        def exec_module(self, module: Any) -> None:
            module.value = 1

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, Frozen()) if name == "of_frozen" else None  # type: ignore[arg-type]

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    calls = []
    when_imported("of_frozen", lambda: calls.append(sys.modules["of_frozen"].value))
    try:
        assert importlib.import_module("of_frozen").value == 1
    finally:
        sys.modules.pop("of_frozen", None)
    assert calls == [1]
