"""Ways in which a sample draws random numbers from the generators that it finds."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import choice
from typing import Any

import numpy as np
import torch
from torch import nn

WAYS: dict[str, Callable[[], Any]] = {
    "random.random": lambda: random.random(),
    "random.getrandbits": lambda: random.getrandbits(77),
    "random.gauss": lambda: [random.gauss(0, 1), random.gauss(0, 1)],
    "random.choice, by name": lambda: choice(range(10**6)),
    "random.shuffle": lambda: random.shuffle(items := list(range(9))) or items,
    "numpy.random.rand": lambda: np.random.rand(2).tolist(),
    "numpy.random.randint": lambda: np.random.randint(10**6, size=2).tolist(),
    "numpy.random.permutation": lambda: np.random.permutation(9).tolist(),
    "torch.rand": lambda: torch.rand(2).tolist(),
    "torch.randn": lambda: torch.randn(2).tolist(),
    "torch.randint": lambda: torch.randint(10**6, (2,)).tolist(),
    "torch.randperm": lambda: torch.randperm(9).tolist(),
    "torch.rand_like": lambda: torch.rand_like(torch.ones(2)).tolist(),
    "torch.randn_like": lambda: torch.randn_like(torch.ones(2)).tolist(),
    "torch.bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)).tolist(),
    "torch.multinomial": lambda: torch.multinomial(torch.ones(99), 3).tolist(),
    "torch.normal": lambda: torch.normal(0.0, 1.0, (2,)).tolist(),
    "Tensor.uniform_": lambda: torch.empty(2).uniform_().tolist(),
    "Tensor.normal_": lambda: torch.empty(2).normal_().tolist(),
    "Tensor.exponential_": lambda: torch.empty(2).exponential_().tolist(),
    "torch.distributions": lambda: torch.distributions.Normal(0.0, 1.0).sample().item(),
    "torch.nn.init": lambda: nn.init.kaiming_uniform_(torch.empty(2, 2)).tolist(),
}
