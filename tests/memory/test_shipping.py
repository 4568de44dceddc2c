"""What is sent to fresh processes: failures that are not the fault of what is sent."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

from hybridloader.errors import WorkerPicklingError
from hybridloader.memory import shipping
from hybridloader.memory.shipping import ship

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memfd")


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "of its own"), WorkerPicklingError)],
    ids=["interrupt", "its own"],
)
def test_whatever_ends_it_no_descriptor_stays(
    error: BaseException, told: type[BaseException]
) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(told):
        ship([bytes(100_000), Raises(error)], "the list", share=True)
    assert psutil.Process().num_fds() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("nbytes", [10, 1_000_000], ids=["at the end", "at once"])
def test_a_lack_of_room_is_told_as_that(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shipping, "nameless_file", lambda: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(OSError, match="no room to send it to workers: No space left"):
        ship(bytes(nbytes), "the bytes", share=True)


def test_a_lack_of_descriptors_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shipping, "nameless_file", none)
    with pytest.raises(OSError, match="Too many open files"):
        ship(b"", "the bytes", share=True)
