"""ignite: an engine runs a pipeline; save and load the states of both."""

import torch
from ignite.engine import Engine, Events
from torch import nn

from hybridloader import Pipeline, PipelineLoader


def sample(index):
    x = torch.tensor([index / 60])
    return x, (3 * x).sin()


def loader_of(backend):
    pipe = Pipeline.from_dataset(range(60), shuffle=True)
    return PipelineLoader(
        pipe.map(sample, backend=backend, num_workers=2).batch(10), seed=0
    )


def trainer_of(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Engine(update)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    trainer, saved = trainer_of(model), {}

    with loader_of("threads") as loader:

        @trainer.on(Events.ITERATION_COMPLETED(once=8))  # in the second epoch
        def stop(engine):
            saved.update(engine=engine.state_dict(), loader=loader.state_dict())
            engine.terminate()

        trainer.run(loader, max_epochs=5)
    print(
        f"stopped after {trainer.state.iteration} steps, loss {trainer.state.output:.3f}"
    )

    resumed = trainer_of(model)
    resumed.load_state_dict(saved["engine"])
    with loader_of("fork") as loader:
        loader.load_state_dict(saved["loader"])
        resumed.run(loader)  # the rest of that epoch, and three more
    print(
        f"ended after {resumed.state.iteration} steps, loss {resumed.state.output:.3f}"
    )


if __name__ == "__main__":
    main()
