"""accelerate: register the loader of a pipeline to save its state with the model."""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn

from hybridloader import Pipeline, PipelineLoader


def sample(index):
    x = torch.tensor([index / 320])
    return x, torch.sin(3 * x)


def train(folder, backend, *, resume):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), 0.01)
    )
    pipe = Pipeline.from_dataset(range(320), shuffle=True)
    pipe = pipe.map(sample, backend=backend, num_workers=2)
    pipe = pipe.batch(32).to(accelerator.device)
    with PipelineLoader(pipe, seed=0) as loader:
        accelerator.register_for_checkpointing(loader)
        if resume:
            accelerator.load_state(folder)
        steps = 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
            if steps == 4 and not resume:
                accelerator.save_state(folder)
                break
        print(f"{backend}: {steps} steps, loss {loss:.4f}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        train(folder, "threads", resume=False)  # 4 of the 10 batches of the first epoch
        train(folder, "fork", resume=True)  # the other 6


if __name__ == "__main__":
    main()
