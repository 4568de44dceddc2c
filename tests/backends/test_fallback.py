"""Fallbacks and warnings where processes are a risk: daemonic processes, forks beside other threads."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from hybridloader import DataLoader, Fork, Inline, Memory, Pipeline, SharedMemory, Spawn, Threads
from hybridloader._support.text import warn, warn_once
from hybridloader.backends.process import backend as process_backend
from hybridloader.backends.process.backend import AsTorch
from hybridloader.engine.contract import Backend, Crew, usable
from hybridloader.errors import BackendUnavailable

needs_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"
)
MEMORY = Memory(limit=12345)
PROCESSES = [
    pytest.param(Fork(MEMORY), id="fork"),
    pytest.param(Spawn(MEMORY), id="spawn"),
    pytest.param(SharedMemory(memory=MEMORY), id="shared-memory"),
    pytest.param(SharedMemory("forkserver", MEMORY), id="forkserver"),
    pytest.param(AsTorch(memory=MEMORY), id="the default"),
]


class Elsewhere(Backend):
    """Backend of another package, which does not say that it starts children."""

    name: ClassVar[str] = "elsewhere"
    in_process: ClassVar[bool] = False

    def open(self) -> Crew:
        raise AssertionError("not to be opened")


@pytest.fixture
def daemonic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process, as if another loader had made it."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


# -- daemonic processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", PROCESSES)
def test_in_a_daemonic_process_threads_take_the_place_of_processes(
    backend: Any, daemonic: None
) -> None:
    with pytest.warns(UserWarning, match=r"daemonic.*threads instead.*backend='threads'") as caught:
        found = usable(backend)
    assert found == Threads(memory=MEMORY)
    assert [warning.filename for warning in caught] == [__file__]


def test_it_is_told_once_per_process(daemonic: None) -> None:
    with pytest.warns(UserWarning, match="daemonic") as caught:
        found = [usable(backend) for backend in (Fork(), Spawn(), Fork())]
    assert found == [Threads()] * 3
    assert len(caught) == 1


@pytest.mark.parametrize(
    "backend", [Inline(), Threads(copy_dataset=True), Elsewhere()], ids=lambda chosen: chosen.name
)
def test_what_serves_there_or_is_not_known_stays(backend: Backend, daemonic: None) -> None:
    assert usable(backend) is backend


@pytest.mark.parametrize("backend", PROCESSES)
def test_in_other_processes_everything_stays(backend: Any) -> None:
    assert usable(backend) is backend


@needs_fork
@pytest.mark.parametrize("backend", PROCESSES)
def test_a_backend_that_is_opened_by_hand_still_refuses(backend: Any, daemonic: None) -> None:
    with pytest.raises(BackendUnavailable, match=r"daemonic.*threads"):
        backend.check()


# -- forks beside threads --------------------------------------------------------------------------


@pytest.fixture
def fresh_fork_warning() -> Iterator[None]:
    process_backend._warned.clear()
    yield
    process_backend._warned.clear()


class Running:
    """A thread with a name; a context manager that ends it."""

    def __init__(self, name: str) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._end.wait, name=name)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


def forking_loader(backend: Any) -> Any:
    data: Any = range(3)
    return DataLoader(data, num_workers=1, collate_fn=list, backend=backend)


FORKS = [pytest.param(Fork(), id="fork"), pytest.param(SharedMemory("fork"), id="shared-memory")]


@needs_fork
@pytest.mark.parametrize("backend", FORKS)
def test_a_fork_beside_other_threads_is_warned_of_once(
    backend: Any, fresh_fork_warning: None
) -> None:
    pipe = Pipeline.from_dataset(range(3), backend=backend, num_workers=1)
    loader = forking_loader(backend)
    with Running("the user's reader"), pytest.warns(UserWarning, match="threads") as caught:
        found = [list(loader), list(pipe), list(loader), list(pipe)]
    assert found == [[[0], [1], [2]], [0, 1, 2]] * 2
    (warning,) = caught
    for part in (backend.name, "the user's reader", "spawn", "before these threads start"):
        assert part in str(warning.message)
    assert warning.filename == __file__


@needs_fork
def test_a_pipeline_is_warned_of_where_it_is_run(fresh_fork_warning: None) -> None:
    pipe = Pipeline.from_dataset(range(3), backend="fork", num_workers=1)
    with Running("another"), pytest.warns(UserWarning, match="another") as caught:
        assert list(pipe) == [0, 1, 2]
    assert [warning.filename for warning in caught] == [__file__]


@needs_fork
def test_many_threads_are_counted_and_four_of_them_named(fresh_fork_warning: None) -> None:
    with (
        Running("one"),
        Running("two"),
        Running("three"),
        Running("four"),
        Running("five"),
        Running("six"),
        pytest.warns(UserWarning, match=r"\(one, two, three, four and 2 more\)"),
    ):
        Fork().check()


@needs_fork
@pytest.mark.parametrize("backend", [*FORKS, pytest.param(AsTorch(), id="the default")])
def test_our_own_threads_are_not_warned_of(backend: Any, fresh_fork_warning: None) -> None:
    with warnings.catch_warnings(), Running("hybridloader-map-0"):
        warnings.simplefilter("error")
        backend.check()


@needs_fork
@pytest.mark.filterwarnings("error")
def test_on_one_of_our_threads_the_main_thread_is_none_to_warn_of(fresh_fork_warning: None) -> None:
    found: list[Any] = []

    def check() -> None:
        try:
            Fork().check()
            found.append(None)
        except UserWarning as warning:  # warnings are errors here
            found.append(str(warning))

    for name in ("hybridloader-relay", "the user's"):
        thread = threading.Thread(target=check, name=name)
        thread.start()
        thread.join()
    assert found[0] is None
    assert "MainThread" in found[1]


@pytest.mark.parametrize(
    "backend",
    [Threads(), Inline(), Spawn(), SharedMemory("spawn"), SharedMemory("loky"), AsTorch()],
    ids=["threads", "inline", "spawn", "shared-memory by spawn", "by loky", "the default"],
)
def test_what_does_not_fork_and_the_default_warn_of_no_thread(
    backend: Any, fresh_fork_warning: None
) -> None:
    with warnings.catch_warnings(), Running("the user's reader"):
        warnings.simplefilter("error")
        backend.check()


def test_the_line_that_a_warning_is_about_is_the_callers() -> None:
    with pytest.warns(UserWarning, match="of this line") as caught:
        warn("of this line", "daemonic")  # this very file is none of ours
    assert caught[0].filename == __file__
