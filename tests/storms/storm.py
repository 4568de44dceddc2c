"""Storms: epochs during which workers die, hang and fail at random, and the account of what came of it.

A storm is drawn from one number, its seed, which is in every message, so it can be repeated. What must
hold: each index comes out exactly once, delivered or listed as skipped; nothing hangs; nothing is left.
As a script it goes on until so many faults were injected, and tells what became of them:

    python tests/storms/storm.py --faults 10000
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridloader import DataLoader, Pipeline, RestartPolicy, Skip

SIGNALS = hasattr(signal, "SIGSTOP")
"""Whether there are the signals of POSIX. On Windows `os.kill` ends a process, and nothing else."""

DEATHS = ("kill", "segv", "bus", "exit", "sys.exit") if SIGNALS else ("kill", "exit", "sys.exit")
"""Ways for a worker to end itself in the middle of a sample."""

_STOP = ("stop",) if SIGNALS else ()

FAULTS = {
    "inline": ("raise", "slow"),
    "threads": ("raise", "slow", "huge", "sys.exit"),
    "fork": (*DEATHS, *_STOP, "raise", "slow", "huge"),
    "spawn": (*DEATHS, *_STOP, "raise", "slow", "huge"),
    "shared-memory": (*DEATHS, *_STOP, "raise", "slow", "huge"),
    "ray": (*DEATHS, "raise", "slow", "huge"),
}
"""Faults that a sample can have, by backend. A thread can't be killed, and the caller can't die."""

LASTING = ("raise",)
"""Faults that happen whenever the sample is read; the others happen once."""

SLOW = 0.02
"""Seconds of a slow sample: many times an ordinary one, which takes microseconds."""

HUGE = 3 << 20
"""Bytes of a huge one: through a slot where there are slots, else through the stream in many pieces."""

TASK_TIMEOUT = 0.5
"""Seconds after which a worker counts as stuck. Meant for those that are stopped; one that was only
starved of CPU may be killed, too, and must be missed as little."""

PATIENCE = 120.0
"""Seconds after which an epoch that does not go on counts as a hang."""

POLICY = RestartPolicy(max_restarts=10**9, window_seconds=1.0, deaths_per_sample=10**9)
"""Restarts without end: it is the faults that end. Deaths at random must not look like one sample's."""


class Fault(Exception):
    """Error that a sample raises in a storm."""


@dataclass(frozen=True)
class Weather:
    """Settings of a storm; everything else follows from `seed`."""

    seed: int
    backend: str
    form: str  # "loader", "iterable" or "pipeline"
    workers: int = 3
    length: int = 120
    batch_size: int = 4
    share: float = 0.15  # of the samples, with a fault
    strikes: float = 0.1  # deaths from outside, for each batch
    kinds: tuple[str, ...] | None = None  # all that the backend knows

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.form} on {self.backend} x {self.workers}, "
            f"{self.length} samples by {self.batch_size}"
        )


class Plan:
    """Fault of each sample, with a record of those that happened: a file, which outlives any process."""

    def __init__(self, weather: Weather, folder: Path) -> None:
        rng = random.Random(f"{weather.seed}/plan")
        kinds = weather.kinds or FAULTS[weather.backend]
        if weather.form == "iterable":  # its iterator is a generator, which an error ends
            kinds = tuple(kind for kind in kinds if kind not in LASTING)
        self.faults = {
            index: rng.choice(kinds)
            for index in range(weather.length)
            if rng.random() < weather.share
        }
        self._path = str(folder / "happened")
        Path(self._path).write_bytes(bytes(weather.length))

    def strike(self, index: int) -> Any:
        """Suffer the fault of sample `index`, in a worker; return the sample."""
        kind = self.faults.get(index)
        if kind is not None and kind not in LASTING and not self._note(index):
            kind = None  # it has happened
        if kind in LASTING:
            self._note(index)
        if kind is not None:
            _HAPPEN.get(kind, _nothing)()
        if kind == "huge":
            return np.full(HUGE // 8, index, dtype=np.int64)
        return np.array([index])

    def _note(self, index: int) -> bool:
        """Tell whether this is the first time, and record it."""
        with open(self._path, "r+b", buffering=0) as file:
            file.seek(index)
            first = file.read(1) == b"\0"
            file.seek(index)
            file.write(b"\1")
        return first

    def happened(self) -> Counter[str]:
        done = Path(self._path).read_bytes()
        return Counter(kind for index, kind in self.faults.items() if done[index])


def _kill(signum: str, pid: int | None = None) -> Callable[[], None]:
    return lambda: os.kill(pid or os.getpid(), getattr(signal, signum, signal.SIGTERM))


def _raise() -> None:
    raise Fault("as planned")


def _nothing() -> None:
    return


_HAPPEN: dict[str, Callable[[], Any]] = {
    "kill": _kill("SIGKILL"),
    "segv": _kill("SIGSEGV"),
    "bus": _kill("SIGBUS"),
    "stop": _kill("SIGSTOP"),
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(3),
    "raise": _raise,
    "slow": lambda: time.sleep(SLOW),
}


class Samples:
    """A map-style dataset in a storm."""

    def __init__(self, plan: Plan, length: int) -> None:
        self.plan, self.length = plan, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.plan.strike(index)


def shards(plan: Plan, length: int) -> Any:
    """An iterable dataset in a storm: worker k of n reads every n-th sample, from k on."""
    import torch.utils.data

    from hybridloader import get_worker_info

    class Shards(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            first, step = (0, 1) if info is None else (info.id, info.num_workers)
            for index in range(first, length, step):
                yield plan.strike(index)

    return Shards()


def indices_in(batch: Any) -> list[int]:
    """The indices of the samples of a batch, each nothing but its index, once or very often."""
    return [int(sample.reshape(-1)[0]) for sample in batch]


@dataclass
class Account:
    """Samples and faults of a storm, counted."""

    delivered: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0

    def check(self, weather: Weather, plan: Plan) -> None:
        """Raise `AssertionError` unless each index came out exactly once."""
        times = Counter(self.delivered) + Counter(self.skipped)
        lost = sorted(set(range(weather.length)) - set(times))
        doubled = sorted(index for index, count in times.items() if count > 1)
        assert not lost, f"{weather}: lost {lost}"
        assert not doubled, f"{weather}: doubled {doubled}"
        may_fail = {index for index, kind in plan.faults.items() if kind in LASTING}
        wrong = sorted(set(self.skipped) - may_fail)
        assert not wrong, f"{weather}: skipped {wrong}, which had nothing"
        raised = {index for index, kind in plan.faults.items() if kind in LASTING}
        missed = sorted(raised & set(self.delivered))
        assert not missed, f"{weather}: delivered {missed}, which can't be had"


def ride_out(weather: Weather) -> Account:
    """Go through one storm, and see that nothing is lost or doubled."""
    account = Account()
    with tempfile.TemporaryDirectory(prefix="hybridloader-chaos-") as folder:
        plan = Plan(weather, Path(folder))
        run = _pipeline if weather.form == "pipeline" else _loader
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores
            run(weather, plan, account)
        account.faults += plan.happened()
        account.check(weather, plan)
    return account


def _loader(weather: Weather, plan: Plan, account: Account) -> None:
    iterable = weather.form == "iterable"
    dataset = (shards if iterable else Samples)(plan, weather.length)
    inline = weather.backend == "inline"
    loader = DataLoader(
        dataset,
        weather.batch_size,
        num_workers=weather.workers,
        collate_fn=list,
        backend=weather.backend,
        timeout=PATIENCE,
        on_error=Skip(max_failures=None),
        on_worker_death=POLICY,
        task_timeout=0 if inline or weather.backend == "threads" else TASK_TIMEOUT,
    )
    striker = Striker(weather, account)
    with iter(loader) as it:
        for batch in it:
            account.delivered += indices_in(batch)
            del batch
            striker.strike([it._stage])
        account.restarts += sum(it._stage.table.restarts)
        account.skipped += [record.index for record in it.skipped]


def _pipeline(weather: Weather, plan: Plan, account: Account) -> None:
    where: dict[str, Any] = {"on_error": Skip(max_failures=None)}
    if weather.backend != "inline":
        where |= {
            "backend": weather.backend,
            "num_workers": weather.workers,
            "timeout": PATIENCE,
            "on_worker_death": POLICY,
        }
    if weather.backend not in ("inline", "threads"):
        where["task_timeout"] = TASK_TIMEOUT
    pipe = Pipeline.from_iterable(range(weather.length)).map(plan.strike, **where)
    pipe = pipe.map(_first, **where, fuse=False) if weather.backend != "inline" else pipe
    striker = Striker(weather, account)
    with pipe.run() as run:
        for item in run:
            account.delivered.append(int(item.reshape(-1)[0]))
            striker.strike([running.stage for running in run._executor.stages.values()])
        stages = run._executor.stages.values()
        account.restarts += sum(sum(running.stage.table.restarts) for running in stages)
        account.skipped += [int(record.index) for record in run.skipped]


def _first(sample: Any) -> Any:
    return sample


class Striker:
    """Kills and stops workers from outside, now and then."""

    def __init__(self, weather: Weather, account: Account) -> None:
        self._rng = random.Random(f"{weather.seed}/strikes")
        self._account = account
        processes = weather.backend not in ("inline", "threads")
        self._share = weather.strikes if processes else 0.0

    def strike(self, stages: list[Any]) -> None:
        if self._rng.random() >= self._share:
            return
        stage = self._rng.choice(stages)
        worker = self._rng.randrange(len(stage.handles))
        handle, state = stage.handles[worker], stage._scheduler.workers[worker]
        kind = "stop" if self._rng.random() < 0.1 else "kill"
        if kind == "stop" and state.name == "STARTING":
            return  # it would be found, but only after half a minute
        if handle.pid is None or not handle.is_alive():
            return
        try:
            _kill("SIGSTOP" if kind == "stop" else "SIGKILL", handle.pid)()
        except (ProcessLookupError, PermissionError):  # the stage has just found that it is dead
            return
        self._account.faults[f"{kind} from outside"] += 1


def weathers(seed: int, backends: tuple[str, ...]) -> Iterator[Weather]:
    """Storms without end."""
    rng = random.Random(seed)
    forms = ("loader", "pipeline", "iterable")
    while True:
        yield Weather(
            seed=rng.getrandbits(32),
            backend=rng.choice(backends),
            form=rng.choice(forms),
            workers=rng.randint(1, 5),
            length=rng.choice((1, 17, 120, 400)),
            batch_size=rng.choice((1, 4, 10)),
            share=rng.choice((0.02, 0.15, 0.5)),
            strikes=rng.choice((0.0, 0.1, 0.3)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000, help="go on until so many happened")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--backends", nargs="+", default=["fork", "shared-memory", "threads"])
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    if "ray" in options.backends:
        import ray

        # Two steps of five workers each, and those that have not gone yet.
        start = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init("local", num_cpus=16, **start)
    total: Counter[str] = Counter()
    epochs = samples = restarts = 0
    began = time.monotonic()
    for weather in weathers(options.seed, tuple(options.backends)):
        account = ride_out(weather)
        total += account.faults
        epochs, restarts = epochs + 1, restarts + account.restarts
        samples += len(account.delivered) + len(account.skipped)
        spent = time.monotonic() - began
        print(
            f"\r{sum(total.values()):,} faults, {restarts:,} restarts, {epochs:,} epochs, {spent:.0f} s",
            end="",
            flush=True,
        )
        if sum(total.values()) >= options.faults:
            break
    print()
    for kind, count in total.most_common():
        print(f"{kind:20} {count:>8,}")
    print(
        f"{samples:,} samples in {epochs:,} epochs, {restarts:,} workers replaced; 0 lost, 0 doubled"
    )


if __name__ == "__main__":
    main()
