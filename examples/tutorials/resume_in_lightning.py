"""Lightning on Slurm: SIGTERM mid-epoch, a checkpoint, and the exact rest of the epoch.

    python examples/tutorials/resume_in_lightning.py

The script plays Slurm: it starts training jobs, sends them a signal in the middle of a step, and starts
them again. Then it compares the batches that the weights have seen with those of an uninterrupted run.
"""
# needs: lightning

import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import Dataset

from hybridloader import DataLoader
from hybridloader.sampling import ShuffleSampler

SAMPLES, BATCH, EPOCHS = 80, 8, 3

REQUEUE = 75
"""Exit code by which the training asks its job script for a requeue."""


# -- the training ----------------------------------------------------------------------------------


class Points(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = index / SAMPLES
        return index, torch.tensor([x]), torch.tensor([math.sin(3 * x)])


class Curve(lightning.LightningModule):
    def __init__(self, backend):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.backend = backend

    def train_dataloader(self):
        data = Points()
        sampler = ShuffleSampler(data, seed=0)
        loader = DataLoader(
            data, BATCH, sampler=sampler, num_workers=2, backend=self.backend
        )
        loader.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return loader

    def training_step(self, batch, _):
        _, x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class History(Callback):
    """Batches that these weights have been trained on. A checkpoint contains them."""

    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append(batch[0].tolist())

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]

    def on_train_end(self, trainer, module):
        result = {"batches": self.batches, "weights": module.state_dict()}
        torch.save(result, Path(trainer.default_root_dir, "result.pt"))


def trainer_of(folder, callbacks, environment):
    return lightning.Trainer(
        max_epochs=EPOCHS,
        default_root_dir=folder,
        callbacks=[History(), *callbacks],
        plugins=[environment],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(folder, backend, *callbacks):
    """Train, or resume: the same call for the first start and for each restart."""
    checkpoints = ModelCheckpoint(folder, save_on_exception=True, save_last=True)
    environment = SLURMEnvironment(auto_requeue=False)
    trainer = trainer_of(folder, [checkpoints, *callbacks], environment)
    try:
        trainer.fit(Curve(backend), ckpt_path="last")
    except SIGTERMException:
        sys.exit(REQUEUE)


def train_by_auto_requeue(folder, backend, *callbacks):
    """The same with Lightning's own checkpoint and requeue on SIGUSR1."""
    trainer = trainer_of(folder, callbacks, SLURMEnvironment(auto_requeue=True))
    trainer.fit(Curve(backend))


# -- Slurm -----------------------------------------------------------------------------------------


class Signal(Callback):
    """A signal to all processes of the job, while it trains on the fourth batch of its second epoch."""

    def __init__(self, signum):
        self.signum = signum

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 13 and "SLURM_RESTART_COUNT" not in os.environ:
            place = f"batch {batch_idx + 1} of epoch {trainer.current_epoch + 1}"
            print(f"  {signal.Signals(self.signum).name} during {place}", flush=True)
            os.killpg(0, self.signum)


def job(variables, program, *arguments):
    os.setsid()
    os.environ.update(variables)
    program(*arguments)


def slurm(program, *callbacks):
    """Run a job as Slurm does. If it was interrupted, start it again. Return its result."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1"}
    variables |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    # Saves the imports; sbatch starts Python
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        # `scontrol requeue` ends a job, and queues it
        scontrol = Path(folder, "scontrol")
        scontrol.write_text('#!/bin/sh\necho "  scontrol $*"\nkill -TERM 0\n')
        scontrol.chmod(0o755)
        variables["PATH"] = f"{folder}:{os.environ['PATH']}"
        result = Path(folder, "result.pt")
        for restarts, backend in enumerate(["fork", "threads"]):
            if restarts:
                variables["SLURM_RESTART_COUNT"] = str(restarts)
            process = forks.Process(
                target=job, args=(variables, program, folder, backend, *callbacks)
            )
            process.start()
            process.join()
            print(
                f"  start {restarts + 1}, workers on {backend}: exit code {process.exitcode}"
            )
            if result.exists():
                break
        return torch.load(result)


def compare(whole, result):
    """Print whether a result is that of the uninterrupted run."""
    same = all(
        torch.equal(whole["weights"][name], result["weights"][name])
        for name in whole["weights"]
    )
    missing = [batch for batch in whole["batches"] if batch not in result["batches"]]
    print(
        f"  trained on {len(result['batches'])} batches; missing: {missing or 'none'}"
    )
    print(
        f"  same batches, same order: {result['batches'] == whole['batches']}; same weights: {same}"
    )


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("uninterrupted", flush=True)
    whole = slurm(train)
    print(
        "SIGTERM, a checkpoint after the batch, a requeue by the job script", flush=True
    )
    compare(whole, slurm(train, Signal(signal.SIGTERM)))
    print("SIGUSR1, Lightning's own checkpoint and requeue", flush=True)
    compare(whole, slurm(train_by_auto_requeue, Signal(signal.SIGUSR1)))


if __name__ == "__main__":
    main()
