"""How `random`, `numpy.random` and torch come to look for what a thread has instead of theirs.

Only while something is installed, which is while workers on threads run under ``seeding="sample"``, or
run their `init_fn`:

- `random`: its one hidden instance gets a class that asks the thread first. So all of the module's
  functions do, however they were imported, except `random` and `getrandbits` themselves, which are C:
  those are replaced in the module.
- `numpy.random`: the functions of the module are replaced. They are methods of one C object that has no
  class to exchange.
- torch: a `TorchFunctionMode`, on that thread alone, passes its generator to each function that
  takes one. The functions that seed or read the default generator get other code.

On threads that make no sample all is as ever, but counted. Nothing here says when it is installed.
"""

from __future__ import annotations

import functools
import inspect
import random
import threading
import types
from collections.abc import Callable
from typing import Any

from hybridloader.foreign import attribute
from hybridloader.seeds.draws import now


class Moves:
    """What threads that make no sample do to the global generators, by way of what is installed.

    Attributes
    ----------
    others
        How often they have moved each; both before and behind a move, where others could look between.
    drawing
        Threads that are in a function of numpy's, which may leave the GIL and so take any time.
    """

    def __init__(self) -> None:
        self.others = {"random": 0, "numpy": 0}
        self.drawing: set[int] = set()


moves = Moves()


# -- random ------------------------------------------------------------------------------------------

HIDDEN: random.Random = random._inst


class _ByThread(random.Random):
    """The class of the module's hidden instance while something is installed.

    Without `super()`, which refuses an instance that has its own class back: a thread may be in one of
    these, or keep one for ever (``from random import random`` in a module that a sample imports).
    """

    __slots__ = ()  # the layout must be that of `random.Random`

    def random(self) -> float:
        mine = now.stand_ins
        if mine is not None:
            return float(mine.python.random())
        moves.others["random"] += 1
        try:
            return random.Random.random(self)
        finally:
            moves.others["random"] += 1

    def getrandbits(self, k: int, /) -> int:
        mine = now.stand_ins
        if mine is not None:
            return int(mine.python.getrandbits(k))
        moves.others["random"] += 1
        try:
            return random.Random.getrandbits(self, k)
        finally:
            moves.others["random"] += 1

    def seed(self, a: Any = None, version: int = 2) -> None:
        mine = now.stand_ins
        if mine is not None:
            mine.python.seed(a, version)
            return
        random.Random.seed(self, a, version)
        moves.others["random"] += 1

    def getstate(self) -> tuple[Any, ...]:
        mine = now.stand_ins
        return random.Random.getstate(self) if mine is None else mine.python.getstate()

    def setstate(self, state: Any) -> None:
        mine = now.stand_ins
        if mine is not None:
            mine.python.setstate(state)
            return
        random.Random.setstate(self, state)
        moves.others["random"] += 1

    @property
    def gauss_next(self) -> float | None:  # the second of a pair, which `gauss` keeps
        mine = now.stand_ins
        found: float | None
        found = self.__dict__.get("gauss_next") if mine is None else mine.python.gauss_next
        return found

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        mine = now.stand_ins
        if mine is None:
            self.__dict__["gauss_next"] = value
        else:
            mine.python.gauss_next = value


_C_OR_OVERRIDDEN = ("random", "getrandbits", "seed", "getstate", "setstate")


class Patches:
    """Attributes of modules that are replaced, and what they were."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def set(self, module: Any, name: str, value: Any) -> None:
        self._before.append((module, name, getattr(module, name), value))
        setattr(module, name, value)

    def undo(self) -> None:
        for module, name, before, value in reversed(self._before):
            if getattr(module, name, None) is value:  # else somebody has replaced it since
                setattr(module, name, before)
        self._before.clear()


def install_random(patches: Patches) -> None:
    HIDDEN.__class__ = _ByThread
    for name in _C_OR_OVERRIDDEN:
        patches.set(random, name, getattr(HIDDEN, name))


# -- numpy -------------------------------------------------------------------------------------------

_PLAIN = {"seed": "seed", "ranf": "random_sample", "sample": "random_sample"}
"""Functions of `numpy.random` that are no methods, and the methods that do the same."""


def install_numpy(patches: Patches) -> None:
    import numpy as np

    mtrand: Any = np.random.mtrand
    singleton = mtrand._rand
    for name in dir(np.random):
        function = getattr(np.random, name)
        if name in _PLAIN or getattr(function, "__self__", None) is singleton:
            shim = _by_thread(function, _PLAIN.get(name, name))
            patches.set(np.random, name, shim)
            if getattr(mtrand, name, None) is not None:
                patches.set(mtrand, name, shim)


def _by_thread(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def shim(*args: Any, **kwargs: Any) -> Any:
        mine = now.stand_ins
        if mine is not None and mine.array is not None:
            return getattr(mine.array, method)(*args, **kwargs)
        here = threading.get_ident()
        moves.drawing.add(here)
        try:
            return function(*args, **kwargs)
        finally:
            moves.others["numpy"] += 1
            moves.drawing.discard(here)

    return shim


# -- torch -------------------------------------------------------------------------------------------

_FUNCTIONS = (
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
)
_METHODS = (
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "bernoulli",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
)
_WITHOUT = (
    "dropout",
    "dropout_",
    "alpha_dropout",
    "alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
    "feature_alpha_dropout",
    "feature_alpha_dropout_",
    "native_dropout",
    "rrelu",
    "rrelu_",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "gumbel_softmax",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
)
"""What may draw and takes no generator, in torch and in torch.nn.functional."""


@functools.cache
def mode_class() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    takes = {getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)}
    takes |= {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)}
    # Within a Python function that torch has told the mode of, the mode is off.
    for function in vars(torch.nn.init).values():
        if inspect.isfunction(function) and "generator" in inspect.signature(function).parameters:
            takes.add(function)
    homes: tuple[Any, ...] = (torch, torch.nn.functional)
    without = {getattr(home, n) for home in homes for n in _WITHOUT if hasattr(home, n)}

    class Mode(TorchFunctionMode):
        def __init__(self, mine: Any) -> None:
            super().__init__()
            self._mine = mine

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in takes:
                kwargs = kwargs or {}
                given = kwargs.get("generator")
                if (given is None or given is torch.default_generator) and _on_cpu(args, kwargs):
                    kwargs = {**kwargs, "generator": self._mine.tensor}
                return func(*args, **kwargs)
            if func in without:
                default = torch.default_generator
                before = default.get_state()
                try:
                    return func(*args, **(kwargs or {}))
                finally:
                    if not torch.equal(before, default.get_state()):
                        self._mine.past.add("torch")
            return func(*args, **(kwargs or {}))

    return Mode


def _on_cpu(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return str(device).partition(":")[0] == "cpu"
    device = attribute(args[0], "device") if args else None
    return device is None or device.type == "cpu"


def _asking(name: str) -> types.CodeType:
    """Return the code of a function that calls what its module has under a name of ours."""
    made: dict[str, Any] = {}
    exec(f"def {name}(*args, **kwargs): return _hybridloader_{name}(*args, **kwargs)", made)
    code: types.CodeType = made[name].__code__
    return code


def install_torch(patches: Patches) -> None:
    import torch

    def set_state(mine: Any, new_state: Any) -> None:
        mine.set_state(new_state)

    def shim(function: Any, instead: Callable[..., Any]) -> Callable[..., Any]:
        def by_thread(*args: Any, **kwargs: Any) -> Any:
            mine = now.stand_ins
            if mine is None or mine.tensor is None:
                return function(*args, **kwargs)
            return instead(mine.tensor, *args, **kwargs)

        return by_thread

    # Their code is replaced, not the names: they may have been imported on their own.
    generator: Any = torch.Generator
    for name, instead in {
        "manual_seed": lambda mine, seed: mine.manual_seed(int(seed)),
        "seed": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": generator.get_state,
        "set_rng_state": set_state,
    }.items():
        function = getattr(torch.random, name)
        code = function.__code__
        before = types.FunctionType(code, function.__globals__, name)
        function.__globals__[f"_hybridloader_{name}"] = shim(before, instead)
        patches.set(function, "__code__", _asking(name))
