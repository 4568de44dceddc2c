"""ignite: pass the loader to the engine; a deterministic engine resumes mid-epoch."""

import torch
from ignite.engine import DeterministicEngine, Events
from torch import nn

from hybridloader import DataLoader


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        x = torch.tensor([index / 60]) + 0.01 * torch.randn(1)
        return x, (3 * x).sin()


def trainer_of(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return DeterministicEngine(update)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Noisy(), 10, shuffle=True, num_workers=2, backend="fork")
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    trainer, saved = trainer_of(model), {}

    @trainer.on(Events.ITERATION_COMPLETED(once=8))  # in the second epoch
    def stop(engine):
        saved.update(engine.state_dict())
        engine.terminate()

    trainer.run(loader, max_epochs=5)
    print(
        f"stopped after {trainer.state.iteration} steps, loss {trainer.state.output:.3f}"
    )

    resumed = trainer_of(model)
    resumed.load_state_dict(saved)
    resumed.run(loader)  # the rest of that epoch, and three more
    print(
        f"ended after {resumed.state.iteration} steps, loss {resumed.state.output:.3f}"
    )


if __name__ == "__main__":
    main()
