"""Libraries whose threads a fork would lose, so that a forked worker which uses them hangs or fails.

A library counts when it is imported and its threads run: before that, nothing of it could be lost.
Each row of `HAZARDS` was tried with the version that it names. Left out are those that make their
threads anew in a fork: pyarrow's own pools (of 496 forks beside a busy scan all went on reading; only a
reader that is open across the fork waits for ever, and no thread tells of that), and zarr since 3.0.3.
"""

from __future__ import annotations

import re
import sys
import threading
from typing import NamedTuple

from hybridloader.backends.process import fork_safety


class Hazard(NamedTuple):
    """Library that does not survive a fork."""

    library: str  # module that must be imported
    threads: str  # beginning of the names of its threads
    reason: str  # predicate of the library
    told: str  # address of what its authors say
    mended: tuple[int, ...] = ()  # first version that survives; empty: none

    @property
    def runs(self) -> str:
        return f"{self.library} is in use here and {self.reason} ({self.told})"


HAZARDS = (
    Hazard(
        "polars",  # 2.1.0: the next query waits for ever
        "polars-",
        "waits in a forked process for its threads, which a fork does not copy",
        "https://docs.pola.rs/user-guide/misc/multiprocessing",
    ),
    Hazard(
        "lance",  # 14.0.2 answered; its authors still say that it is not fork-safe
        "lance",
        "may wait in a forked process for its threads, which a fork does not copy",
        "https://github.com/lance-format/lance/issues/3640",
    ),
    Hazard(
        "av",  # 18.1.0: a decoder that the parent has opened waits for ever
        "av:",
        "has decoders open, whose threads a fork does not copy",
        "https://github.com/PyAV-Org/PyAV/issues/1962",
    ),
    Hazard(
        "fsspec",  # 2026.9.0: RuntimeError("This class is not fork-safe"); s3fs and gcsfs also wait
        "fsspecIO",
        "runs an event loop on a thread, which a fork does not copy, so its file systems fail or hang",
        "https://github.com/fsspec/filesystem_spec/issues/835",
    ),
    Hazard(
        "zarr",  # 3.0.2
        "zarr_io",
        "runs an event loop on a thread, which a fork does not copy",
        "https://github.com/zarr-developers/zarr-python/pull/2815",
        (3, 0, 3),
    ),
    Hazard(
        "pyarrow",  # 26.0.1 answered; the authors of the library below it do not support forks
        "AwsEventLoop",
        "runs threads of AWS's library for S3, which a fork does not copy",
        "https://github.com/awslabs/aws-crt-python/pull/628",
    ),
)
"""Table of the libraries, with what was seen and with which version."""


def fork_hazard() -> Hazard | None:
    """Return a library that runs threads in this process and does not survive a fork; None if none."""
    imported = [hazard for hazard in HAZARDS if hazard.library in sys.modules]
    if not imported:
        return None
    names = {thread.name for thread in threading.enumerate()}
    if fork_safety.tells_threads():
        names.update(fork_safety.other_threads())
    for hazard in imported:
        if any(name.startswith(hazard.threads) for name in names) and not _is_mended(hazard):
            return hazard
    return None


def _is_mended(hazard: Hazard) -> bool:
    found = str(getattr(sys.modules[hazard.library], "__version__", ""))
    version = tuple(map(int, re.findall(r"\d+", found)[:3]))
    return bool(hazard.mended) and version >= hazard.mended
