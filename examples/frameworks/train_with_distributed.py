"""torch.distributed: each rank has a loader and a share of the data. With or without torchrun."""

import gc
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from hybridloader import DataLoader
from hybridloader.sampling import DistributedShuffleSampler

EPOCHS = 3


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 101

    def __getitem__(self, index):
        x = torch.tensor([index / 100])
        return index, x, 2 * x - 1


def train():
    """Train on one rank; the process group is initialized."""
    data = Points()
    # Or torch's DistributedSampler(data). This one needs no list of indices, and can resume.
    sampler = DistributedShuffleSampler(data, seed=0, uneven="drop")
    loader = DataLoader(data, 10, sampler=sampler, num_workers=2, backend="threads")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        seen = []
        for index, x, y in loader:
            seen += index.tolist()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, seen)
        if dist.get_rank() == 0:
            both = {index for part in parts for index in part}
            sizes = " + ".join(str(len(part)) for part in parts)
            print(
                f"epoch {epoch}: {sizes} samples, {len(both)} different, loss {loss.item():.3f}"
            )


def rank_of_two(rank, meeting):
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    train()
    leave()


def leave():
    """Leave together: otherwise SIGABRT may end a rank (torch 2.13, gloo)."""
    gc.collect()  # DDP is part of a reference cycle, and holds threads of the group
    dist.barrier()  # no rank leaves while another one is in a collective
    dist.destroy_process_group()


def main():
    if "RANK" in os.environ:  # torchrun --nproc-per-node 2 train_with_distributed.py
        dist.init_process_group("gloo")
        train()
        leave()
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            rank_of_two, (os.path.join(folder, "meeting"),), nprocs=2
        )


if __name__ == "__main__":
    main()
