"""Exceptions, deaths, timeouts and closes: the same words and the same order on every backend."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hybridloader import (
    BackendUnavailable,
    DataLoader,
    IteratorClosed,
    ResultNotSendable,
    WorkerDied,
    WorkerTimeout,
)
from hybridloader.backends.sockets import SocketChannel
from hybridloader.dataloader import LoaderIterator
from hybridloader.testing import Gate

PROCESSES = ("fork", "spawn", "shared-memory")
ALL = ("inline", "threads", *PROCESSES)
WAITING = ("threads", *PROCESSES)
"""Backends whose workers work while the caller waits."""

MEGABYTE = 1 << 20

every_backend = pytest.mark.parametrize("backend", ALL)
every_process = pytest.mark.parametrize("backend", PROCESSES)


class Samples(Dataset[Any]):
    """A dataset whose samples are what a function makes of the index."""

    def __init__(self, function: Callable[[int], Any], length: int = 8) -> None:
        self.function, self.length = function, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def load(
    dataset: Any, backend: str | None, *, workers: int = 1, collate_fn: Any = list, **options: Any
) -> DataLoader:
    return DataLoader(
        dataset, num_workers=workers, collate_fn=collate_fn, backend=backend, **options
    )


def start(loader: DataLoader) -> LoaderIterator:
    iterator: Any = iter(loader)
    return iterator  # type: ignore[no-any-return]


def outcomes(iterator: Iterator[Any]) -> list[Any]:
    """What successive calls of ``next()`` give, exceptions included, until the end."""
    found: list[Any] = []
    while len(found) < 100:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)
    raise AssertionError(f"there is no end to it: {found[:10]}...")


def kinds(found: list[Any]) -> list[Any]:
    """`outcomes` with exceptions replaced by their types, to be compared."""
    return [type(item) if isinstance(item, Exception) else item for item in found]


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# -- what a worker raises ------------------------------------------------------------------------


class TwoArguments(Exception):
    """Can't be unpickled by pickle's own way: its constructor wants two arguments."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code, "by keyword")


class WithAttribute(Exception):
    detail: Any = None


class RefusesToPickle(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


class RefusesToLoad(Exception):
    def __reduce__(self) -> Any:
        return _explode, ("an exception",)


class NotedValueError(ValueError):
    pass


def _explode(what: str) -> Any:
    raise ArithmeticError(f"{what} that can't be loaded")


def _with_attribute() -> Exception:
    error = WithAttribute("see detail")
    error.detail = {"path": "x.png", "position": 7}
    return error


def _with_note() -> Exception:
    error = NotedValueError("noted")
    error.__notes__ = ["the user's own note"]  # type: ignore[attr-defined]
    return error


EXCEPTIONS: list[tuple[Callable[[], Exception], dict[str, Any]]] = [
    (lambda: ValueError(), {}),
    (lambda: ValueError("some", 1, None), {}),
    (lambda: KeyError("a key"), {}),
    (lambda: IndexError(3), {}),
    (lambda: TwoArguments(404, "not found"), {"code": 404}),
    (lambda: KeywordOnly(code=5), {}),
    (_with_attribute, {"detail": {"path": "x.png", "position": 7}}),
    (lambda: RefusesToPickle("really", 2), {}),
    (lambda: RefusesToLoad("really", 2), {}),
    (lambda: FileNotFoundError(2, "No such file", "x.png"), {"errno": 2, "filename": "x.png"}),
    (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"), {"object": b"\xff"}),
    (lambda: subprocess.CalledProcessError(3, ["cp"], b"out"), {"returncode": 3, "stdout": b"out"}),
    (lambda: json.JSONDecodeError("bad", "{", 1), {"pos": 1, "doc": "{"}),
    (lambda: RuntimeError("StopIteration-like", b"\x00"), {}),
    (_with_note, {}),
]


def raise_exception(index: int) -> Any:
    if index == len(EXCEPTIONS):
        return "fine"
    raise EXCEPTIONS[index][0]()  # the line that fails


@every_backend
def test_exceptions_keep_their_type_arguments_and_attributes(backend: str) -> None:
    loader = load(Samples(raise_exception, len(EXCEPTIONS) + 1), backend, workers=2)
    found = outcomes(iter(loader))
    assert len(found) == len(EXCEPTIONS) + 1
    assert found[-1] == ["fine"]
    for index, (make, attributes) in enumerate(EXCEPTIONS):
        error, wanted = found[index], make()
        assert type(error) is type(wanted)
        assert error.args == wanted.args
        assert str(error) == str(wanted)
        for name, value in attributes.items():
            assert getattr(error, name) == value
        assert "# the line that fails" in text_of(error)
        assert "in raise_exception" in text_of(error)
        assert "'DataLoader'" in notes_of(error)
        assert f"worker {index % 2} " in notes_of(error)
        assert f"[{index}]" in notes_of(error)
    assert "the user's own note" in notes_of(found[len(EXCEPTIONS) - 1])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_exception_of_a_caller_that_does_the_work_is_the_one_raised(workers: int) -> None:
    error = TwoArguments(1, "x")

    def fail(index: int) -> Any:
        raise error

    with pytest.raises(TwoArguments) as caught:
        next(iter(load(Samples(fail), "inline", workers=workers)))
    assert caught.value is error
    assert "[0]" in notes_of(error)


@every_backend
def test_an_exception_class_made_in_a_function_can_be_caught(backend: str) -> None:
    class Local(Exception):
        pass

    def fail(index: int) -> Any:
        raise Local("mine", index)

    found = outcomes(iter(load(Samples(fail, 2), backend)))
    assert [type(error) for error in found] == [Local, Local]
    assert [error.args for error in found] == [("mine", 0), ("mine", 1)]


@every_backend
def test_an_exception_class_made_in_the_worker_keeps_its_name(backend: str) -> None:
    def fail(index: int) -> Any:
        class MadeThere(LookupError):
            pass

        raise MadeThere("mine", index)

    (error,) = outcomes(iter(load(Samples(fail, 1), backend)))
    assert type(error).__name__ == "MadeThere"
    assert isinstance(error, LookupError)
    assert error.args == ("mine", 0)


@every_backend
def test_what_an_exception_holds_and_can_not_be_sent_is_told_by_its_repr(backend: str) -> None:
    def fail(index: int) -> Any:
        error = WithAttribute("a lock:", threading.Lock())
        error.detail = threading.Lock()
        raise error

    found = outcomes(iter(load(Samples(fail, 2), backend)))
    assert len(found) == 2
    for error in found:
        assert type(error) is WithAttribute
        assert error.args[0] == "a lock:"
        assert "lock" in str(error.args[1])
        assert "lock" in str(error.detail)


@every_backend
def test_the_cause_of_an_exception_is_told(backend: str) -> None:
    def fail(index: int) -> Any:
        try:
            return {}["inner key"]  # the inner line
        except KeyError as error:
            raise ValueError("outer") from error

    (error,) = outcomes(iter(load(Samples(fail, 1), backend)))
    assert "# the inner line" in text_of(error)
    assert "direct cause" in text_of(error)


@every_backend
def test_errors_of_a_worker_on_another_thread_of_the_caller_arrive_there(backend: str) -> None:
    found: list[Any] = []

    def work() -> None:
        found.extend(outcomes(iter(load(Samples(_fail_on_third, 3), backend))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kinds(found) == [[0], [1], ArithmeticError]


def _fail_on_third(index: int) -> int:
    if index % 3 == 2:
        raise ArithmeticError("third", index)
    return index


# -- the iterator goes on ------------------------------------------------------------------------


class Shards(IterableDataset[int]):
    """Each worker's shard fails at its third item; a generator is over then, an object goes on."""

    def __init__(self, generator: bool) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first = 0 if info is None else 10 * info.id
        return self._generate(first) if self.generator else _Fragile(first)

    @staticmethod
    def _generate(first: int) -> Iterator[int]:
        yield from (first, first + 1)
        raise ArithmeticError("third")


class _Fragile(Iterator[int]):
    def __init__(self, first: int) -> None:
        self.first, self.count = first, 0

    def __next__(self) -> int:
        self.count += 1
        if self.count == 3:
            raise ArithmeticError("third")
        if self.count > 5:
            raise StopIteration
        return self.first + self.count


DATASETS: dict[str, Callable[[], Any]] = {
    "map": lambda: Samples(_fail_on_third, 9),
    "generator": lambda: Shards(generator=True),
    "iterator": lambda: Shards(generator=False),
}


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize(
    ("backend", "workers"),
    [(None, 0), ("inline", 1), ("inline", 2), ("threads", 2), ("fork", 2), ("spawn", 2)],
)
def test_after_an_error_the_same_batches_come_as_with_torchs_loader(
    backend: str | None, workers: int, dataset: str
) -> None:
    theirs = torch.utils.data.DataLoader(
        DATASETS[dataset](), batch_size=2, num_workers=workers, collate_fn=list
    )
    wanted = kinds(outcomes(iter(theirs)))
    assert ArithmeticError in wanted
    loader = load(DATASETS[dataset](), backend, workers=workers, batch_size=2)
    assert kinds(outcomes(iter(loader))) == wanted


@every_backend
def test_persistent_workers_go_on_after_errors_in_every_epoch(backend: str) -> None:
    loader = load(Samples(_fail_on_third, 5), backend, persistent_workers=True)
    wanted = [[0], [1], ArithmeticError, [3], [4]]
    assert [kinds(outcomes(iter(loader))) for _ in range(2)] == [wanted, wanted]


# -- errors outside of the samples ---------------------------------------------------------------


def _broken_init(worker: int) -> None:
    raise LookupError("no luck", worker)  # the init line


@every_backend
def test_an_error_in_worker_init_fn_is_raised_by_next(backend: str) -> None:
    iterator = start(load(Samples(int), backend, worker_init_fn=_broken_init))
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            next(iterator)
        assert caught.value.args == ("no luck", 0)
        assert "# the init line" in text_of(caught.value)
        assert "worker 0 " in notes_of(caught.value)


def test_worker_init_fn_is_not_called_when_the_caller_does_the_work() -> None:
    loader = load(Samples(int, 2), None, workers=0, worker_init_fn=_broken_init)
    assert list(loader) == [[0], [1]]


class Unopenable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise FileNotFoundError(2, "No such shard", "shard-0")  # the opening line


@every_backend
def test_an_error_in_the_iter_of_the_dataset_is_raised_by_next(backend: str) -> None:
    iterator = start(load(Unopenable(), backend))
    with pytest.raises(FileNotFoundError) as caught:
        next(iterator)
    assert caught.value.filename == "shard-0"
    assert "# the opening line" in text_of(caught.value)


def test_an_error_in_the_iter_of_the_dataset_is_raised_by_iter_without_workers() -> None:
    for kind in (torch.utils.data.DataLoader, DataLoader):
        with pytest.raises(FileNotFoundError):
            iter(kind(Unopenable()))


@pytest.mark.parametrize(("backend", "workers"), [(None, 0), *((name, 2) for name in ALL)])
def test_an_error_in_the_sampler_comes_after_the_batches_before_it(
    backend: str | None, workers: int
) -> None:
    def sampler() -> Iterator[int]:
        yield from (4, 5, 6)
        raise ArithmeticError("no more")  # the sampler's line

    loader = load(Samples(int), backend, workers=workers, sampler=sampler())
    found = outcomes(iter(loader))
    assert kinds(found) == [[4], [5], [6], ArithmeticError]
    assert "# the sampler's line" in text_of(found[-1])


@every_backend
def test_an_error_in_the_iter_of_the_sampler_is_raised_by_iter(backend: str) -> None:
    class Sampler:
        def __iter__(self) -> Iterator[int]:
            raise ArithmeticError("no sampler")

    class Direct:
        """A batch sampler; torch calls its ``iter()`` at once."""

        def __iter__(self) -> Iterator[list[int]]:
            raise ArithmeticError("no sampler")

    with pytest.raises(ArithmeticError):
        iter(load(Samples(int), backend, batch_sampler=Direct()))
    (error,) = outcomes(iter(load(Samples(int), backend, sampler=Sampler())))
    assert type(error) is ArithmeticError


@every_backend
def test_an_error_in_collate_fn_is_that_batchs_alone(backend: str) -> None:
    def collate(samples: list[int]) -> list[int]:
        if 2 in samples:
            raise ArithmeticError("can't collate", samples)  # the collating line
        return samples

    found = outcomes(iter(load(Samples(int), backend, batch_size=2, collate_fn=collate)))
    assert kinds(found) == [[0, 1], ArithmeticError, [4, 5], [6, 7]]
    assert found[1].args == ("can't collate", [2, 3])
    assert "# the collating line" in text_of(found[1])
    assert "[2, 3]" in notes_of(found[1])


def _leak_stop_iteration(index: int) -> int:
    return next(iter([])) if index == 1 else index  # the leaking line


@pytest.mark.parametrize(("backend", "workers"), [(None, 0), *((name, 1) for name in ALL)])
def test_a_stop_iteration_that_a_map_style_dataset_leaks_does_not_end_the_loop(
    backend: str | None, workers: int
) -> None:
    found = outcomes(iter(load(Samples(_leak_stop_iteration, 3), backend, workers=workers)))
    assert kinds(found) == [[0], RuntimeError, [2]]
    assert "StopIteration" in str(found[1])
    assert "# the leaking line" in text_of(found[1])
    assert "[1]" in notes_of(found[1])


# -- dead workers --------------------------------------------------------------------------------


def _die_by(signum: int) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), signum)


DEATHS: dict[str, tuple[Callable[[], Any], str]] = {
    "kill": (_die_by(signal.SIGKILL), "SIGKILL"),
    "term": (_die_by(signal.SIGTERM), "SIGTERM"),
    "segfault": (lambda: (faulthandler.disable(), ctypes.string_at(0)), "SIGSEGV"),
    "abort": (os.abort, "SIGABRT"),
    "exit-0": (lambda: os._exit(0), "code 0"),
    "exit-3": (lambda: os._exit(3), "code 3"),
    "sys.exit": (lambda: sys.exit(5), "code 5"),
    "sys.exit-none": (sys.exit, "code 0"),
}


def _dying(death: str) -> Callable[[int], int]:
    def sample(index: int) -> int:
        if index == 3:
            _quietly(DEATHS[death][0])
        return index

    return sample


def _quietly(die: Callable[[], Any]) -> None:
    """Keep what a dying process has to say (faulthandler's, for instance) out of the log."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    die()


def _deaths() -> Iterator[tuple[str, str, str]]:
    for death in DEATHS:
        yield "fork", death, "main thread"
        yield "shared-memory", death, "other thread"
    for death in ("kill", "exit-3", "sys.exit"):  # its workers take their time to start
        yield "spawn", death, "main thread"
    yield "spawn", "segfault", "other thread"


@pytest.mark.parametrize(("backend", "death", "where"), list(_deaths()))
def test_a_dead_worker_is_named_with_what_killed_it_and_what_it_had_to_do(
    backend: str, death: str, where: str
) -> None:
    found: list[Any] = []

    def work() -> None:
        iterator = start(load(Samples(_dying(death)), backend, workers=2))
        pids = [worker.pid for worker in iterator._workers]
        for _ in range(8):
            try:
                found.append(next(iterator))
            except WorkerDied as error:
                found.append(error)
                break
        with pytest.raises(WorkerDied, match=f"pid {pids[1]}"):
            next(iterator)
        assert f"pid {pids[1]}" in str(found[-1])
        assert not any(worker.is_alive() for worker in iterator._workers)

    if where == "main thread":
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    *before, error = found
    assert before == [[0], [1], [2]][: len(before)]
    assert isinstance(error, WorkerDied)
    assert isinstance(error, RuntimeError)
    assert "worker 1 " in str(error)
    assert "[3]" in str(error)
    assert "'DataLoader'" in str(error)
    assert DEATHS[death][1] in str(error)


def test_a_worker_that_the_system_killed_is_told_to_lack_memory_perhaps() -> None:
    with pytest.raises(WorkerDied, match=r"memory.*threads"):
        list(load(Samples(_dying("kill")), "fork"))


@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
def test_a_thread_that_is_ended_is_named(exception: type[BaseException]) -> None:
    def sample(index: int) -> int:
        if index == 3:
            raise exception(5)  # the exiting line
        return index

    iterator = start(load(Samples(sample), "threads", workers=2))
    with pytest.raises(WorkerDied) as caught:
        outcomes_until_error(iterator)
    text = str(caught.value)
    for word in ("worker 1 ", "[3]", exception.__name__, "# the exiting line"):
        assert word in text
    with pytest.raises(WorkerDied):
        next(iterator)


def outcomes_until_error(iterator: Iterator[Any]) -> None:
    for _ in iterator:
        pass


@pytest.mark.parametrize("workers", [0, 2])
def test_a_caller_that_plays_the_workers_exits_itself(workers: int) -> None:
    def sample(index: int) -> int:
        if index == 3:
            sys.exit(5)
        return index

    iterator = start(load(Samples(sample), "inline", workers=workers))
    with pytest.raises(SystemExit) as caught:
        outcomes_until_error(iterator)
    assert caught.value.code == 5
    with pytest.raises(IteratorClosed):
        next(iterator)


def _die_once(flag: Path, die: Callable[[], Any]) -> Callable[[int], int]:
    def sample(index: int) -> int:
        if index == 1 and not flag.exists():
            flag.touch()
            die()
        return index

    return sample


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("backend", WAITING)
def test_after_a_death_the_next_epoch_works_again(
    backend: str, persistent: bool, tmp_path: Path
) -> None:
    die = (lambda: sys.exit(3)) if backend == "threads" else _die_by(signal.SIGKILL)
    dataset = Samples(_die_once(tmp_path / "flag", die), 4)
    loader = load(dataset, backend, persistent_workers=persistent)
    with pytest.raises(WorkerDied):
        list(loader)
    assert [list(loader) for _ in range(2)] == [[[0], [1], [2], [3]]] * 2


def _die_at_init(worker: int) -> None:
    os._exit(9)


@every_process
def test_a_worker_that_dies_at_its_start_is_named(backend: str) -> None:
    with pytest.raises(WorkerDied, match=r"worker 0 .*code 9"):
        list(load(Samples(int), backend, worker_init_fn=_die_at_init))


@every_process
def test_an_idle_persistent_worker_that_died_is_replaced_or_told(backend: str) -> None:
    loader = load(Samples(int, 2), backend, persistent_workers=True)
    iterator = start(loader)
    assert outcomes(iterator) == [[0], [1]]
    (worker,) = iterator._workers
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(10)
    with contextlib.suppress(WorkerDied):
        assert list(loader) == [[0], [1]]
    assert list(loader) == [[0], [1]]


def test_a_worker_whose_parent_hangs_up_without_reading_sees_the_end_of_its_input() -> None:
    """What is unread when a socket is closed makes the other side's next read an error."""
    ours, theirs = multiprocessing.Pipe(duplex=True)
    channel = SocketChannel(theirs)
    try:
        channel.send([b"a result that nobody reads"])
        ours.close()
        with pytest.raises(EOFError):
            channel.get()
    finally:
        channel.close()


def test_writing_after_the_worker_has_ended_is_the_end_too() -> None:
    """Its writer thread may still be at a large frame; a traceback of it would be noise."""
    ours, theirs = multiprocessing.Pipe(duplex=True)
    channel = SocketChannel(theirs)
    channel.close()
    with pytest.raises(EOFError):
        channel.send([b"late"])
    ours.close()


# -- results that can't be sent ------------------------------------------------------------------


class StaysHere:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


UNSENDABLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "generator": lambda: (x for x in "abc"),
    "StaysHere": StaysHere,
    "_local": threading.local,
}


@pytest.mark.parametrize("batch_size", [1, None])
@every_backend
def test_a_result_that_can_not_be_sent_is_named_and_the_next_one_comes(
    backend: str, batch_size: int | None
) -> None:
    names = list(UNSENDABLE)

    def sample(index: int) -> Any:
        return UNSENDABLE[names[index // 2]]() if index % 2 else index

    dataset = Samples(sample, 2 * len(names))
    loader = load(dataset, backend, batch_size=batch_size, collate_fn=_same)
    found = outcomes(iter(loader))
    assert len(found) == 2 * len(names)
    good: Callable[[int], Any] = (lambda i: [i]) if batch_size else (lambda i: i)
    assert found[::2] == [good(index) for index in range(0, 2 * len(names), 2)]
    for index, error in enumerate(found):
        if index % 2 == 0:
            continue
        if backend in ("inline", "threads"):
            value = error[0] if batch_size else error
            assert type(value) is type(UNSENDABLE[names[index // 2]]())
            continue
        assert isinstance(error, ResultNotSendable)
        assert isinstance(error, TypeError)
        wanted = "list" if batch_size else names[index // 2]
        assert wanted in str(error)
        assert "threads" in str(error)
        assert (f"[{index}]" if batch_size else f"{index}.") in notes_of(error)


def _same(value: Any) -> Any:
    return value


class Bomb:
    def __reduce__(self) -> Any:
        return _explode, ("a result",)


@pytest.mark.parametrize("extra", [0, MEGABYTE])
@every_process
def test_a_result_that_can_not_be_loaded_is_an_error_of_its_batch_alone(
    backend: str, extra: int
) -> None:
    def sample(index: int) -> Any:
        return (torch.full((extra,), index), Bomb() if index in (1, 2) else index)

    found = outcomes(iter(load(Samples(sample, 6), backend)))
    assert [type(item) for item in found] == [list, ArithmeticError, ArithmeticError, *[list] * 3]
    for index in (0, 3, 4, 5):
        ((tensor, number),) = found[index]
        assert number == index
        assert torch.equal(tensor, torch.full((extra,), index))
    for index in (1, 2):
        assert "a result that can't be loaded" in str(found[index])
        assert f"[{index}]" in notes_of(found[index])
        assert "worker 0 " in notes_of(found[index])


@every_process
def test_an_exception_that_can_not_be_loaded_is_an_error_of_its_batch_alone(backend: str) -> None:
    class Stubborn(Exception):
        def __new__(cls, *args: Any) -> Any:
            if os.getpid() == home:
                raise ArithmeticError("not in this process")
            return super().__new__(cls, *args)

    home = os.getpid()

    def fail(index: int) -> int:
        if index == 1:
            raise Stubborn("hello")
        return index

    found = outcomes(iter(load(Samples(fail, 3), backend)))
    assert kinds(found) == [[0], RuntimeError, [2]]
    assert "Stubborn" in text_of(found[1])
    assert "hello" in text_of(found[1])


# -- timeout -------------------------------------------------------------------------------------


def _at_gate(gate: Gate, wanted: int) -> Callable[[int], int]:
    def sample(index: int) -> int:
        if index == wanted:
            gate.arrive()
        return index

    return sample


@pytest.mark.parametrize("backend", WAITING)
def test_a_late_batch_is_named_and_can_still_be_waited_for(backend: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    loader = load(Samples(_at_gate(gate, 1), 4), backend, timeout=0.3, persistent_workers=True)
    iterator = start(loader)
    found: list[Any] = []
    errors: list[WorkerTimeout] = []
    while len(found) < 4:
        try:
            found.append(next(iterator))
        except WorkerTimeout as error:
            errors.append(error)
            if len(found) == 1:
                gate.await_arrivals()
                gate.open()
    assert found == [[0], [1], [2], [3]]
    late = next(error for error in errors if "[1]" in str(error))
    assert isinstance(late, RuntimeError)
    assert isinstance(late, TimeoutError)
    assert "worker 0 " in str(late)
    assert "0.3 seconds" in str(late)
    assert "'DataLoader'" in str(late)
    assert outcomes(iterator) == []


def test_a_caller_that_does_the_work_never_times_out() -> None:
    def slow(index: int) -> int:
        time.sleep(0.3)
        return index

    assert list(load(Samples(slow, 2), "inline", timeout=0.2)) == [[0], [1]]


# -- large things --------------------------------------------------------------------------------


def _large(index: int) -> Any:
    if index % 3 == 0:
        return torch.full((3 * MEGABYTE,), index, dtype=torch.int32)
    return bytes([index]) * (11 * MEGABYTE) if index % 3 == 1 else index


@every_backend
def test_results_beyond_ten_megabytes_arrive(backend: str) -> None:
    found = list(load(Samples(_large, 9), backend, batch_size=None, collate_fn=_same, workers=2))
    assert len(found) == 9
    for index, value in enumerate(found):
        if index % 3 == 0:
            assert value.nbytes == 12 * MEGABYTE
            assert value.min() == value.max() == index
        elif index % 3 == 1:
            assert value == bytes([index]) * (11 * MEGABYTE)
        else:
            assert value == index


class Sums(Dataset[int]):
    def __len__(self) -> int:
        return 1 << 30

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [len(indices), sum(indices)]


@every_backend
def test_tasks_of_a_megabyte_of_indices_arrive(backend: str) -> None:
    many = list(range(1 << 20, (1 << 20) + 300_000))
    batches = [[index + shift for index in many] for shift in range(4)]
    loader = load(Sums(), backend, batch_sampler=batches)
    assert list(loader) == [[len(batch), sum(batch)] for batch in batches]


# -- closing -------------------------------------------------------------------------------------


@every_backend
def test_a_closed_iterator_is_over(backend: str) -> None:
    iterator = start(load(Samples(int), backend))
    assert next(iterator) == [0]
    workers = list(iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    iterator.close()
    assert not any(worker.is_alive() for worker in workers)
    for _ in range(2):
        with pytest.raises(IteratorClosed):
            next(iterator)
        iterator.close()
    with pytest.raises(IteratorClosed), iterator:
        pass


@every_backend
def test_leaving_a_with_block_closes_the_iterator(backend: str) -> None:
    with start(load(Samples(int), backend)) as iterator:
        assert next(iterator) == [0]
        workers = list(iterator._workers)
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(IteratorClosed):
        next(iterator)


@every_backend
def test_a_persistent_iterator_that_was_closed_starts_again_with_the_next_epoch(
    backend: str,
) -> None:
    loader = load(Samples(int, 3), backend, persistent_workers=True)
    iterator = start(loader)
    assert next(iterator) == [0]
    iterator.close()
    assert list(loader) == [[0], [1], [2]]
    assert list(loader) == [[0], [1], [2]]


@every_backend
def test_an_exhausted_iterator_stays_exhausted_also_after_a_close(backend: str) -> None:
    iterator = start(load(Samples(int, 1), backend))
    assert list(iterator) == [[0]]
    iterator.close()
    assert list(iterator) == []


@every_backend
def test_a_close_from_another_thread_ends_the_wait(backend: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    iterator = start(load(Samples(_at_gate(gate, 0)), backend))
    waiting = threading.Event()
    crew: Any = iterator._stage._crew
    wait = crew.wait

    def tell_and_wait(timeout: float | None) -> Any:
        waiting.set()
        return wait(timeout)

    crew.wait = tell_and_wait
    found: list[Any] = []

    def pull() -> None:
        try:
            found.append(next(iterator))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    assert waiting.wait(60)
    gate.await_arrivals()
    iterator.close()
    if backend == "inline":  # its waiting is the user's own code, which nobody can end
        assert thread.is_alive()
        gate.open()
    thread.join(60)
    gate.open()
    assert [type(item) for item in found] == [IteratorClosed]


@every_backend
def test_iterators_of_one_loader_do_not_disturb_each_other(backend: str) -> None:
    loader = load(Samples(int, 4), backend)
    first, second = start(loader), start(loader)
    assert [next(first), next(second), next(first)] == [[0], [0], [1]]
    first.close()
    assert list(second) == [[1], [2], [3]]
    with pytest.raises(IteratorClosed):
        next(first)


@pytest.mark.parametrize("exhausted", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("backend", WAITING)
def test_dropping_the_iterator_ends_its_workers(
    backend: str, persistent: bool, exhausted: bool
) -> None:
    loader = load(Samples(int, 3), backend, persistent_workers=persistent)
    iterator = start(loader)
    workers = list(iterator._workers)
    assert next(iterator) == [0]
    if exhausted:
        assert len(list(iterator)) == 2
        assert workers[0].is_alive() is persistent
    gc.disable()  # the last reference must do, not the collector
    try:
        del iterator, loader
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", WAITING)
def test_an_error_does_not_keep_the_iterator_alive(backend: str) -> None:
    gc.disable()
    try:
        iterator = start(load(Samples(_fail_on_third), backend))
        workers = list(iterator._workers)
        with contextlib.suppress(ArithmeticError):
            while True:
                next(iterator)
        del iterator
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


# -- loaders within workers, forks of the user's own ----------------------------------------------


class Nested(Samples):
    def __init__(self, backend: str | None) -> None:
        super().__init__(self.sum_of_inner, 2)
        self.backend = backend

    def sum_of_inner(self, index: int) -> int:
        loader = load(Samples(int, 4), self.backend)
        return sum(number for (number,) in loader)


@pytest.mark.parametrize(
    ("backend", "inner"),
    [*(("fork", inner) for inner in (*PROCESSES, None)), ("spawn", "fork"), ("spawn", "spawn")],
)
def test_a_loader_with_processes_inside_a_worker_is_refused(
    backend: str, inner: str | None
) -> None:
    (error, again) = outcomes(iter(load(Nested(inner), backend)))
    assert type(error) is BackendUnavailable
    assert type(again) is BackendUnavailable
    assert "daemonic" in str(error)
    assert "threads" in str(error)


@pytest.mark.parametrize("inner", ["inline", "threads"])
@every_backend
def test_a_loader_with_threads_may_be_used_inside_a_worker(backend: str, inner: str) -> None:
    assert list(load(Nested(inner), backend)) == [[6], [6]]


@pytest.mark.parametrize(
    ("backend", "inner"), [("inline", "fork"), ("threads", "fork"), ("threads", "spawn")]
)
def test_a_loader_with_processes_may_be_used_inside_a_worker_of_this_process(
    backend: str, inner: str
) -> None:
    assert list(load(Nested(inner), backend)) == [[6], [6]]


def test_a_loader_inside_a_worker_of_torchs_own_is_refused_alike() -> None:
    theirs = torch.utils.data.DataLoader(Nested("fork"), num_workers=1)
    (error, _) = outcomes(iter(theirs))
    assert type(error) is BackendUnavailable
    assert "threads" in str(error)


@pytest.mark.parametrize("persistent", [False, True])
@every_backend
def test_a_fork_in_the_middle_that_drops_the_iterator_does_no_harm(
    backend: str, persistent: bool
) -> None:
    loader = load(Samples(int, 20), backend, persistent_workers=persistent)
    iterator = start(loader)
    found = [next(iterator) for _ in range(3)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            iterator.close()
            del iterator, loader
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    found += list(iterator)
    assert found == [[index] for index in range(20)]


FORKING_SCRIPT = """
    import os, sys
    from hybridloader import DataLoader

    found = []
    loader = DataLoader(range(20), num_workers=1, collate_fn=list, backend=sys.argv[1])
    iterator = iter(loader)
    for batch in iterator:
        found += batch
        if len(found) == 3:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), found == list(range(20)))
"""


@every_backend
def test_a_fork_in_the_middle_of_a_script_that_exits_does_no_harm(
    backend: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(FORKING_SCRIPT))
    done = subprocess.run(
        [sys.executable, script, backend], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["7", "True"]
    assert done.returncode == 0


def test_psutil_sees_no_child_of_ours_at_the_end() -> None:
    """The tools of this module work: what a loader starts is seen, and is gone afterwards."""
    before = set(psutil.Process().children())
    iterator = start(load(Samples(int), "fork", workers=2))
    mine = set(psutil.Process().children()) - before
    assert {child.pid for child in mine} == {worker.pid for worker in iterator._workers}
    iterator.close()
    assert set(psutil.Process().children()) == before
