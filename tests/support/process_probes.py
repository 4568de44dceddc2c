"""What a process can be asked about itself: a table of functions, and a dataset that asks its worker."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridloader import get_worker_info


def descriptors() -> dict[str, int]:
    """Numbers of open descriptors by what they lead to."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[re.sub(r"\[\d+\]|/proc/\d+/", "", os.readlink(link))] += 1
        except OSError:  # that of the listing
            pass
    return dict(found)


_getenv = ctypes.CDLL(None).getenv
_getenv.restype = ctypes.c_char_p


def umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def parent() -> Any:
    found = multiprocessing.parent_process()
    return found and (found.name, found.pid)


def info() -> Any:
    found = get_worker_info()
    assert found is not None
    return found.id, found.num_workers, found.seed, type(found.dataset).__name__


def own_status(*names: str) -> list[str]:
    """Lines of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(names)]


PROBES: dict[str, Callable[[], Any]] = {
    "sys.argv": lambda: sys.argv,
    "sys.path": lambda: sys.path,
    "sys.flags": lambda: repr(sys.flags),
    "sys.warnoptions": lambda: sys.warnoptions,
    "sys.executable": lambda: sys.executable,
    "sys.excepthook": lambda: sys.excepthook is sys.__excepthook__,
    "threading.excepthook": lambda: threading.excepthook is threading.__excepthook__,
    "recursion limit": sys.getrecursionlimit,
    "switch interval": sys.getswitchinterval,
    "trace and profile": lambda: (sys.gettrace(), sys.getprofile()),
    "standard input": lambda: (sys.stdin.closed, sys.stdin.read()),
    "standard output": lambda: (sys.stdout.closed, sys.stdout.fileno(), sys.stdout.line_buffering),
    "standard error": lambda: (sys.stderr.closed, sys.stderr.fileno(), sys.stderr.line_buffering),
    "standard descriptors": lambda: [os.fstat(fd).st_rdev for fd in range(3)],
    "__main__": lambda: (sys.modules["__main__"].__name__, sys.modules["__main__"].__spec__),
    "working directory": os.getcwd,
    "environment": lambda: dict(os.environ),
    "environment of C": lambda: _getenv(b"PROBED"),
    "umask": umask,
    "niceness": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "affinity": lambda: sorted(os.sched_getaffinity(0)),
    "scheduler": lambda: os.sched_getscheduler(0),
    "oom_score_adj": lambda: Path("/proc/self/oom_score_adj").read_text(),
    "process group and session": lambda: (os.getpgid(0), os.getsid(0)),
    "users and groups": lambda: own_status("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp:"),
    "limits": lambda: {
        name: resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    },
    "signal handlers": lambda: {
        one.name: repr(signal.getsignal(one)).partition(" at 0x")[0] for one in signal.Signals
    },
    "signals of the kernel": lambda: own_status("SigBlk", "SigIgn"),
    "blocked signals": lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "wakeup descriptor": lambda: signal.set_wakeup_fd(-1),
    "timers": lambda: signal.getitimer(signal.ITIMER_REAL),
    "faulthandler": faulthandler.is_enabled,
    "locale": lambda: (locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)),
    "time zone": lambda: __import__("time").tzname,
    "warning filters": lambda: [repr(one) for one in warnings.filters],
    "logging": lambda: (logging.root.level, logging.root.handlers, logging.raiseExceptions),
    "process": lambda: (
        multiprocessing.current_process().name,
        multiprocessing.current_process().daemon,
        multiprocessing.active_children(),
    ),
    "parent": parent,
    "start method": lambda: multiprocessing.get_start_method(allow_none=True),
    "main thread": lambda: (
        threading.current_thread() is threading.main_thread(),
        threading.current_thread().name,
        threading.main_thread().native_id == os.getpid(),
    ),
    "threads": lambda: sorted(re.sub(r"\d+", "N", one.name) for one in threading.enumerate()),
    "tasks of the kernel": lambda: len(os.listdir("/proc/self/task")),
    "children": lambda: Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    "garbage collector": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0),
    "exit functions": lambda: atexit._ncallbacks() > 0,
    "worker info": info,
    "torch threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "torch defaults": lambda: (torch.get_default_dtype(), torch.is_grad_enabled()),
    "torch sharing": lambda: torch.multiprocessing.get_sharing_strategy(),
    "devices": lambda: torch.cuda.is_initialized(),
    "seeds": lambda: (torch.initial_seed(), torch.utils.data.get_worker_info().seed),
    "draws": lambda: (
        random.random(),
        float(np.random.random()),
        float(torch.rand(())),
    ),
}
"""By name; each returns what a worker that is started afresh says, and one that is forked must."""


class Asked:
    """Answers of its worker: one sample for each of `length` indices."""

    def __init__(self, length: int, extra: Callable[[], Any] | None = None) -> None:
        self.length, self.extra = length, extra

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.extra is not None:
            return {"extra": self.extra()}
        return {name: probe() for name, probe in PROBES.items()} | {"descriptors": descriptors()}
