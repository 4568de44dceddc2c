"""Fixtures of the backends' tests."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.plain_datasets import PLAIN
from support.process_backends import forget_warnings


@pytest.fixture
def unwarned() -> Iterator[None]:
    """No warning that comes once per process has come."""
    forget_warnings()
    yield
    forget_warnings()


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the support file, importable here and in workers."""
    (tmp_path / "plain_datasets.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("plain_datasets")
    del sys.modules["plain_datasets"]
