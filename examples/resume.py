"""Kill a training run in the middle of an epoch, and resume it elsewhere: python examples/resume.py

The run saves every few steps. It is killed, and another process resumes from the file with other
workers, on another backend. Its losses are those of a run that nobody has killed, to the last bit.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from hybridloader import DataLoader

EPOCHS, EVERY, BATCH = 3, 5, 32
"""Number of epochs, of steps from one checkpoint to the next, and of samples in a batch."""


class Noisy(torch.utils.data.Dataset):
    """Points of a plane, with noise that depends on the point alone."""

    def __len__(self):
        return 640

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=own)
        return x, x.mean().tanh() + 0.1 * torch.randn((), generator=own)


def train(folder, workers, backend, kill_at=0):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    loader = DataLoader(
        Noisy(), BATCH, shuffle=True, num_workers=workers, backend=backend
    )
    checkpoint, log = folder / "checkpoint.pt", folder / "losses.txt"
    epoch, losses = 0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["rng"])
        epoch, losses = saved["epoch"], saved["losses"]
    while epoch < EPOCHS:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % EVERY == 0:
                saved = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "rng": torch.get_rng_state(),
                    "epoch": epoch,
                    "losses": losses,
                }
                torch.save(saved, folder / "new.pt")
                os.replace(folder / "new.pt", checkpoint)
            if len(losses) == kill_at:
                # On Windows SIGTERM ends a process as SIGKILL does elsewhere
                os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        epoch += 1
    log.write_text("\n".join(map(repr, losses)))


def start(folder, *arguments):
    """Start a run in a process of its own."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, __file__, str(folder), *arguments])


def losses_in(folder):
    return [float(line) for line in (folder / "losses.txt").read_text().split()]


def main():
    with tempfile.TemporaryDirectory() as name:
        one, other = Path(name) / "one", Path(name) / "other"
        one.mkdir()
        running = start(other, "2", "processes", "33")
        train(one, 2, "threads")
        killed = running.wait()
        start(other, "3", "threads", "0").wait()
        whole, resumed = losses_in(one), losses_in(other)
    print(
        f"killed after step 33 (exit code {killed}), resumed from step 30 on another backend\n"
    )
    print("step  never killed        killed and resumed")
    for step in range(0, len(whole), 6):
        print(f"{step:4}  {whole[step]:<18.15f}  {resumed[step]:<18.15f}")
    print()
    plot(whole, resumed)
    print("the same to the last bit" if whole == resumed else "not the same")
    return 0 if whole == resumed else 1


def plot(whole, resumed):
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3))
    axes.plot(whole, linewidth=4, alpha=0.4, label="never killed")
    axes.plot(
        resumed, linewidth=1, color="black", label="killed after step 33 and resumed"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.tight_layout()
    picture = Path(tempfile.gettempdir()) / "resume.png"
    figure.savefig(picture)
    print(f"the curves are in {picture}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        folder, workers, backend, kill_at = sys.argv[1:]
        train(Path(folder), int(workers), backend, int(kill_at))
    else:
        sys.exit(main())
