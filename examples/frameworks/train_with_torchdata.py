"""torchdata: hybridloader's loader instead of torchdata's, with stateful datasets and samplers."""

import pickle

import torch
from torchdata.stateful_dataloader import Stateful
from torchdata.stateful_dataloader.sampler import RandomSampler

from hybridloader import StatefulDataLoader


class Log(torch.utils.data.IterableDataset, Stateful):
    """Lines of a log; each worker resumes at its position."""

    def __init__(self, lines):
        self.lines, self.at = lines, 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        mine = self.lines[worker.id :: worker.num_workers]
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def main():
    def loader():
        return StatefulDataLoader(
            Log(list(range(20))), 3, num_workers=2, backend="threads"
        )

    first = iter(interrupted := loader())
    print("before:", [next(first).tolist() for _ in range(3)])
    saved = pickle.dumps(interrupted.state_dict())

    resumed = loader()  # in this process or in another one
    resumed.load_state_dict(pickle.loads(saved))  # or a state of torchdata's loader
    print("after: ", [batch.tolist() for batch in resumed])

    data = torch.utils.data.TensorDataset(torch.arange(8))
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    shuffled = StatefulDataLoader(
        data, 4, sampler=sampler, num_workers=2, backend="threads"
    )
    print("by torchdata's sampler:", [batch.tolist() for (batch,) in shuffled])


if __name__ == "__main__":
    main()
