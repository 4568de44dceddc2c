"""Ranks of a job that share this machine, by the environment variables of their launcher.

A default that counts cores or memory of the machine is divided by them: each rank has a process, with
loaders and workers, that takes the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hybridloader._support.cgroups import whole_number

_NAMES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # mpirun of Open MPI
    "MPI_LOCALNRANKS",  # mpiexec of MPICH and of Intel MPI
    "SLURM_STEP_TASKS_PER_NODE",  # srun: "8", or "8(x2)" on two nodes
)
"""Variables of launchers, first those of launchers that others may start.

Slurm's ``SLURM_NTASKS_PER_NODE`` describes the job: it is also set for a single process of it.
"""


_NUMBERS = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("MPI_LOCALRANKID", "SLURM_LOCALID"),
)
"""Variables with the number of this rank on its machine."""


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this rank on this machine; 0 without a variable.

    Lightning's launcher, for one, sets it without the number of ranks.
    """
    for name in _NUMBERS:
        found = whole_number(environ.get(name, "").strip())
        if found:
            return found
    return 0


def ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this machine, this process among them; 1 without a variable.

    A value that is no integer of 1 or more is ignored.
    """
    for name in _NAMES:
        found = whole_number(environ.get(name, "").partition("(")[0].strip())
        if found:
            return found
    return 1
