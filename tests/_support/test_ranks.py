"""Ranks of a job on this machine, from the variables of launchers."""

from __future__ import annotations

import pytest

from hybridloader.memory.limits import ranks_here

CASES: list[tuple[dict[str, str], int]] = [
    ({}, 1),
    ({"WORLD_SIZE": "16", "LOCAL_RANK": "3"}, 1),  # of all machines
    ({"LOCAL_WORLD_SIZE": "8"}, 8),
    ({"LOCAL_WORLD_SIZE": "1"}, 1),
    ({"LOCAL_WORLD_SIZE": " 8\n"}, 8),
    *(({"LOCAL_WORLD_SIZE": word}, 1) for word in ("", "0", "-2", "2.0", "eight", "9" * 5000)),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
    ({"MPI_LOCALNRANKS": "2"}, 2),
    ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "8,4"}, 1),  # nobody knows which of them this is
    ({"SLURM_NTASKS_PER_NODE": "8"}, 1),  # of the job, of which this may be a step of one task
    ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 8),  # torchrun within srun
    ({"LOCAL_WORLD_SIZE": "none", "MPI_LOCALNRANKS": "2"}, 2),
]


@pytest.mark.parametrize(("environ", "ranks"), CASES)
def test_the_number_of_ranks_follows_from_the_environment(
    environ: dict[str, str], ranks: int
) -> None:
    assert ranks_here(environ) == ranks
