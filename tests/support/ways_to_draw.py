"""Ways in which a sample draws random numbers from the generators that it finds."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import choice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

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
    "functional.dropout": lambda: functional.dropout(torch.ones(40)).tolist(),
    "nn.Dropout": lambda: nn.Dropout(0.3)(torch.ones(40)).tolist(),
    "functional.rrelu": lambda: functional.rrelu(-torch.ones(2), training=True).tolist(),
    "functional.gumbel_softmax": lambda: functional.gumbel_softmax(torch.ones(2)).tolist(),
}

OTHERS: dict[str, Callable[[], Any]] = {
    "torch.dropout": lambda: torch.dropout(torch.ones(40), 0.5, True).tolist(),
    "in place": lambda: functional.dropout(torch.ones(40), inplace=True).tolist(),
    "alpha_dropout": lambda: functional.alpha_dropout(torch.ones(40), training=True).tolist(),
    "dropout2d": lambda: functional.dropout2d(torch.ones(1, 40, 1, 1)).tolist(),
    "feature_alpha_dropout": lambda: functional.feature_alpha_dropout(
        torch.ones(1, 40, 1), training=True
    ).tolist(),
    "nn.RReLU": lambda: nn.RReLU()(-torch.ones(2)).tolist(),
    "fractional_max_pool2d": lambda: functional.fractional_max_pool2d(
        torch.arange(64.0).view(1, 8, 8), 2, output_size=3
    ).tolist(),
    "attention": lambda: functional.scaled_dot_product_attention(
        *torch.ones(3, 1, 4, 4), dropout_p=0.5
    ).tolist(),
    "dropout, with gradients": lambda: functional.dropout(
        torch.ones(40, requires_grad=True)
    ).tolist(),
    "half precision": lambda: functional.dropout(torch.ones(40, dtype=torch.float16)).tolist(),
}
"""Functions of torch without a generator, beside those in `WAYS`."""
