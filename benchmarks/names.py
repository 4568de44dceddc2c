"""Names of the loaders that take part, as measurements and tables show them."""

from __future__ import annotations

BARE_CALLS = "bare calls"
LIMITS = ("limit", "together", BARE_CALLS)
"""The plain loop in one process, in as many processes as there are workers at the same time, and in an
actor of Ray that is called for each batch."""

BACKENDS = ("threads", "fork", "shared-memory")
"""Backends of hybridloader that take part in nearly every case."""

FRESH = (
    "spawn",
    "spawn (preload=False)",
    "shared-memory (loky)",
    "shared-memory (forkserver)",
)
"""Forms of hybridloader whose workers are fresh processes, or forks of one, not of the user's."""

TORCH_FORKSERVER = "torch forkserver"
"""torch's loader with `multiprocessing_context="forkserver"`, where ``torch`` has ``"spawn"``."""

TORCH_ANY_ORDER = "torch any order"
"""torch's loader with `in_order=False`: batches come as they are ready."""

SEEDED, FEW_PROCESSES = "fork by samples", "fork, 4 threads each"
"""`fork` with `seeding="sample"`; and as many threads in a fourth of the processes."""

PROCESS_BACKENDS = ("fork", "shared-memory", *FRESH)
WITH_WORKERS = ("threads", *PROCESS_BACKENDS)
DATALOADERS = ("inline", *WITH_WORKERS)
"""Forms of hybridloader's `DataLoader`."""

PIPELINE = "pipeline"
SPREAD = f"{PIPELINE} spread"
HYBRIDS = (PIPELINE, f"{PIPELINE} fork", SPREAD)
"""Forms of hybridloader's `Pipeline` for three kinds of work; `SPREAD` does all of them in processes."""

BY_SAMPLES = (f"{PIPELINE} threads",)
"""hybridloader's `Pipeline` that makes samples on threads, one task each, and batches behind them."""

BY_COROUTINES = (f"{PIPELINE} coroutines",)
"""hybridloader's `Pipeline` with an `async def`."""

BY_SAMPLE = "by sample"
FROM_STORES = ("blocks", "blocks, cache", BY_SAMPLE, "whole archives")
"""hybridloader's `DataLoader` of `Tar`, and its `Pipeline` with a function that reads an archive."""

RAY, RAY_DATA = "ray", "Ray Data"
"""hybridloader's `DataLoader` on a Ray cluster; and Ray's own."""

OURS = (
    *DATALOADERS,
    RAY,
    *HYBRIDS,
    *BY_SAMPLES,
    *BY_COROUTINES,
    SEEDED,
    FEW_PROCESSES,
    *FROM_STORES,
)

FAMILIES = {
    "torchdata": "torchdata.nodes",
    "SPDL": "SPDL",
    "Grain": "Grain",
    "webdataset": "webdataset",
    "litdata": "litdata",
    "MosaicML": "MosaicML Streaming",
    "pyarrow": "pyarrow",
    "datasets": "datasets",
    "Ray": "Ray Data",
}
"""First word of a rival's name -> the project. A rival may have several forms: 'SPDL threads'."""

PACKAGES = {name: name for name in FAMILIES} | {"SPDL": "spdl-core", "Grain": "grain", "Ray": "ray"}
PACKAGES["MosaicML"] = "mosaicml-streaming"
"""First word of a rival's name -> the package to install."""

RIVAL_THREADS = ("torchdata threads", "SPDL threads", "Grain threads")
RIVAL_PROCESSES = ("torchdata processes", "SPDL subprocess", "SPDL processes", "Grain processes")
FRESH_RIVALS = RIVAL_PROCESSES[2:]
"""Rivals that start fresh processes for every epoch, which takes seconds."""


def family(loader: str) -> str:
    """Project that `loader` belongs to; torch, the limits and ours stand for themselves."""
    return FAMILIES.get(loader.split(" ")[0], loader)


def is_rival(loader: str) -> bool:
    """True if `loader` is neither torch's nor ours."""
    return loader.split(" ")[0] in FAMILIES
