"""Ways in which a sample draws random numbers from the generators that it finds."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import choice
from typing import Any

import numpy as np
import torch

WAYS: dict[str, Callable[[], Any]] = {
    "random.random": lambda: random.random(),
    "random.gauss": lambda: [random.gauss(0, 1), random.gauss(0, 1)],
    "random.choice, by name": lambda: choice(range(10**6)),
    "numpy.random.rand": lambda: np.random.rand(2).tolist(),
    "numpy.random.permutation": lambda: np.random.permutation(9).tolist(),
    "torch.rand": lambda: torch.rand(2).tolist(),
    "torch.randint": lambda: torch.randint(10**6, (2,)).tolist(),
    "torch.randn_like": lambda: torch.randn_like(torch.ones(2)).tolist(),
    "Tensor.normal_": lambda: torch.empty(2).normal_().tolist(),
    "torch.distributions": lambda: torch.distributions.Normal(0.0, 1.0).sample().item(),
}
