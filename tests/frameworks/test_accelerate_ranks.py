"""accelerate on two ranks: shards and dispatch are complete, and go on from a state.

The file is also what each rank runs: ``python test_accelerate_ranks.py FOLDER``, with the rank in the
environment. Both ranks do everything there is to do once, and write down what they saw.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from hybridloader import DataLoader

pytest.importorskip("accelerate")
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from support.accelerate_loaders import kept_loaders

pytestmark = pytest.mark.timeout(400)  # of which the ranks may take 180

BATCH = 3
LENGTH = 26
"""Number of samples, no multiple of two batches: accelerate evens out the end."""

WORLD = 2
LIMIT = 160
"""Seconds for each rank; two imports of accelerate beside each other are most of the 8 they take.

A rank that takes longer prints where each of its threads is, and ends.
"""


class Counted(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(LENGTH))


def numbers(kind: type = DataLoader, data: Any = None, **options: Any) -> Any:
    if kind is DataLoader:
        options = {"backend": "threads", "on_error": "skip", **options}
    data = torch.arange(LENGTH) if data is None else data
    return kind(data, BATCH, **{"num_workers": 1, **options})


def flat(loader: Any) -> list[Any]:
    return [item for batch in loader for item in batch.tolist()]


# -- what a rank does ------------------------------------------------------------------------------


def rank_main(folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    seen = {
        "shards": seen_with({}),
        "seedable": seen_with({"use_seedable_sampler": True}),
        "iterable shards": seen_with({"dispatch_batches": False}, iterable=True),
        "dispatch": seen_with({"dispatch_batches": True}),
        "iterable dispatch": seen_with({"dispatch_batches": True}, iterable=True),
        "split": seen_with({"split_batches": True, "dispatch_batches": True}, batch_size=4),
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def seen_with(config: dict[str, Any], iterable: bool = False, **options: Any) -> dict[str, Any]:
    """Return this rank's batches, torch's and ours: two epochs, after a skip, and resumed."""
    found: dict[str, Any] = {}
    for name, kind in (("torch", torch.utils.data.DataLoader), ("ours", DataLoader)):
        with kept_loaders():
            torch.manual_seed(4)
            helper = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
            given = {} if iterable else {"shuffle": True}
            if "batch_size" in options:
                given["batch_sampler"] = torch.utils.data.BatchSampler(
                    torch.utils.data.SequentialSampler(range(LENGTH)), options["batch_size"], False
                )
                del given["shuffle"]
                made = kind(torch.arange(LENGTH), num_workers=1, **given)
            else:
                made = numbers(kind, Counted() if iterable else None, **given)
            loader = helper.prepare(made)
            seen = {
                "class": type(loader.base_dataloader).__module__.split(".")[0],
                "epochs": [flat(loader), flat(loader)],
                "skipped": flat(skip_first_batches(loader, 2)),
            }
            if kind is DataLoader:
                seen["resumed"] = resumed(loader)
            found[name] = seen
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    return found


def resumed(loader: Any) -> list[Any]:
    """The rest of an epoch behind its second batch, and the same again from the state taken there."""
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    # Frameworks save what the first rank says (Lightning), or the last one that writes (accelerate).
    states = [pickle.loads(pickle.dumps(loader.state_dict()))]
    torch.distributed.broadcast_object_list(states)
    epoch, rest = loader.iteration, flat(iterator)
    loader.load_state_dict(states[0])
    loader.set_epoch(epoch)
    return [rest, flat(loader)]


# -- what is tested --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Batches of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    running = []
    for rank in range(WORLD):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        running.append(
            subprocess.Popen(
                [sys.executable, __file__, str(folder)],
                env={
                    **os.environ,
                    **{name: str(value) for name, value in place.items()},
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "ACCELERATE_USE_CPU": "true",
                },
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for rank, process in enumerate(running):
            _, errors = process.communicate(timeout=LIMIT + 20)
            assert process.returncode == 0, f"rank {rank}: {errors[-4000:]}"
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize(
    "how", ["shards", "seedable", "iterable shards", "dispatch", "iterable dispatch", "split"]
)
def test_two_ranks_get_from_ours_what_they_get_from_torchs(ranks: list[Any], how: str) -> None:
    """All of it, doubling only the end; and the rest of an epoch from its state."""
    for rank in ranks:
        ours, torchs = rank[how]["ours"], rank[how]["torch"]
        assert (ours["class"], torchs["class"]) == ("hybridloader", "torch")
        assert ours["epochs"] == torchs["epochs"]
        assert ours["skipped"] == torchs["skipped"]
        rest, resumed = ours["resumed"]
        if how == "split":  # accelerate subtracts as for batches that are not split: one too many
            assert resumed[-len(rest) :] == rest
            assert len(resumed) == len(rest) + 2
        else:
            assert resumed == rest
    for epoch in range(2):
        parts = [rank[how]["ours"]["epochs"][epoch] for rank in ranks]
        assert set(parts[0]) | set(parts[1]) == set(range(LENGTH))
        assert len(parts[0]) == len(parts[1]) < LENGTH / 2 + BATCH


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
