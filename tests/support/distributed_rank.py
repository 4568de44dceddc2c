"""One rank of a group: ``python distributed_rank.py RANK WORLD FOLDER``, started by test_distributed.

It loads the same data by torch's loader and by ours, on every backend, and writes what it saw to
``FOLDER/RANK.json``. It judges nothing.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.distributed import DistributedSampler

from hybridloader import DataLoader
from hybridloader.sampling import DistributedShuffleSampler
from support.seeded_training import Augmented, Regression, torch_loader

EPOCHS, WORKERS, BATCH = 2, 2, 3
SAMPLES = 21
"""Number of samples, which 2 ranks can't divide evenly."""

BACKENDS: list[str | None] = ["fork", "threads"]

SAMPLERS: dict[str, Callable[[], Any]] = {
    "torch's": lambda: DistributedSampler(range(SAMPLES), seed=3),  # type: ignore[arg-type]
    "torch's, dropping": lambda: DistributedSampler(
        range(SAMPLES),  # type: ignore[arg-type]
        shuffle=False,
        drop_last=True,
    ),
    "ours": lambda: DistributedShuffleSampler(SAMPLES, 3),
    "ours, exact": lambda: DistributedShuffleSampler(SAMPLES, 3, uneven="exact"),
}


def indices(loader: Iterable[torch.Tensor]) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


def epochs_of(loader: Any) -> list[list[int]]:
    found = []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        found.append(indices(loader))
    return found


def losses(loader: Any) -> list[float]:
    """Return the losses of a model whose gradients are averaged over the ranks."""
    torch.manual_seed(1 + dist.get_rank())
    regression = Regression()
    regression.model = DistributedDataParallel(regression.model)
    found = []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        found += [regression.step(batch) for batch in loader]
    return found


def made(backend: str | None, dataset: Any, **options: Any) -> Any:
    """torch's loader for "torch"; workers stay, because some are processes."""
    options = {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True, **options}
    if backend == "torch":
        return torch_loader(dataset, **options)
    return DataLoader(dataset, backend=backend, **options)


def batches_by_loader() -> dict[str, Any]:
    """Return indices and losses by sampler and backend; those of torch's loader are under "torch"."""
    found: dict[str, Any] = {"indices": {}, "losses": {}, "pipes": {}}
    for name, sampler in SAMPLERS.items():
        theirs = torch_loader(range(SAMPLES), BATCH, sampler=sampler())
        found["indices"][name] = {"torch": epochs_of(theirs)} | {
            str(backend): epochs_of(made(backend, range(SAMPLES), sampler=sampler()))
            for backend in BACKENDS
        }
    data = Augmented(SAMPLES)
    for backend in ("torch", *BACKENDS):
        if backend != "threads":  # whose workers draw other random numbers
            loader = made(backend, data, sampler=DistributedSampler(data, seed=5))
            found["losses"][str(backend)] = losses(loader)
    for backend in ("torch", *BACKENDS):
        pipe = IterableWrapper(range(SAMPLES)).shuffle().sharding_filter()
        torch.manual_seed(dist.get_rank())  # the ranks agree on the shared seed by themselves
        loader = made(backend, pipe, shuffle=True)
        found["pipes"][str(backend)] = [indices(loader) for _ in range(EPOCHS)]
    return found


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meeting = (folder / "meeting").as_uri()
    dist.init_process_group(
        "gloo",
        init_method=meeting,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),  # torch's 30 minutes would outlive the test
    )
    try:
        found = batches_by_loader()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
