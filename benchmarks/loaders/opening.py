"""Opening a loader by its name. All get the same workers and prefetch two batches a worker."""

from __future__ import annotations

from benchmarks.case import CannotDo, check_installed
from benchmarks.loaders import cluster, pipelines, rival_grain, rival_spdl, rival_torchdata
from benchmarks.loaders.dataloaders import DATALOADER_OPENERS
from benchmarks.loaders.limits import LIMIT_OPENERS
from benchmarks.loaders.work import Opener, Running, Work
from benchmarks.names import is_rival

_BATCHES: dict[str, Opener] = {
    **LIMIT_OPENERS,
    **DATALOADER_OPENERS,
    **pipelines.BATCH_OPENERS,
    **cluster.BATCH_OPENERS,
    **rival_torchdata.BATCH_OPENERS,
    **rival_spdl.BATCH_OPENERS,
    **rival_grain.BATCH_OPENERS,
}
_BY_STAGES: dict[int, dict[str, Opener]] = {
    0: _BATCHES,
    1: {**_BATCHES, **pipelines.ONE_STAGE_OPENERS},
    3: {
        **_BATCHES,
        **pipelines.HYBRID_OPENERS,
        **rival_torchdata.STAGE_OPENERS,
        **rival_spdl.STAGE_OPENERS,
        **rival_grain.STAGE_OPENERS,
    },
}


def open_loader(name: str, work: Work) -> Running:
    """Open the loader called `name`.

    Raises
    ------
    CannotDo
        It can't do this work, or is not installed.
    """
    if is_rival(name):
        check_installed(name)
        if work.workers == 0:
            raise CannotDo("measured with workers only")
    return _BY_STAGES[work.stages][name](work)
