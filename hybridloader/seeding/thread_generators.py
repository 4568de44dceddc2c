"""Patches that let `random`, `numpy.random` and torch use a thread's generators, not the global ones.

The patches are installed only while workers on threads seed their samples or run their `init_fn`.
docs/randomness.md lists the functions that each patch covers. The class of `random`'s one instance is
exchanged, since functions of it are imported by name. numpy's is an object of C, so its functions are
replaced; torch has a mode for each thread. Threads that make no sample draw from the global generators
as before. This module never changes the state of a global generator.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from hybridloader._support import system
from hybridloader._support.torch_env import when_imported
from hybridloader._support.user_objects import attribute
from hybridloader.seeding.sample_rng import GLOBALS, NUMPY, now

Patch = Callable[[Any, str, Any], None]
"""Function that replaces an attribute (object, name, new value) until the patches are removed."""


# -- random ------------------------------------------------------------------------------------------

_HIDDEN: random.Random = random._inst

_RESEEDING = ("seed", "setstate", "set_state")
"""Names of the functions with which code seeds a generator."""


def _of_thread(name: str) -> Any:
    """Return a method of `random.Random` that uses the generator of the calling thread."""
    # Not `super()`, which fails once the instance has its original class again. A thread may still run
    # one of these methods, or keep one (``from random import random`` in a module a sample imports).
    plain = getattr(random.Random, name)

    @functools.wraps(plain)
    def method(self: random.Random, *args: Any, **kwargs: Any) -> Any:
        mine = now.generators
        if mine is GLOBALS:
            return plain(self, *args, **kwargs)
        if name in _RESEEDING:
            mine.reseeded.add("random")
        return plain(mine.python, *args, **kwargs)

    return method


class _ThreadRandom(random.Random):
    """Class of the module's hidden instance while the patches are installed."""

    __slots__ = ()  # the layout must be that of `random.Random`

    random = _of_thread("random")
    getrandbits = _of_thread("getrandbits")
    seed = _of_thread("seed")
    getstate = _of_thread("getstate")
    setstate = _of_thread("setstate")

    @property
    def gauss_next(self) -> float | None:  # second number of a pair, kept by `gauss`
        mine = now.generators
        found: float | None = vars(self if mine is GLOBALS else mine.python)["gauss_next"]
        return found

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        mine = now.generators
        vars(self if mine is GLOBALS else mine.python)["gauss_next"] = value


def _install_random(patch: Patch) -> None:
    patch(_HIDDEN, "__class__", _ThreadRandom)
    for name in ("random", "getrandbits", "seed", "getstate", "setstate"):  # C, or overridden
        patch(random, name, getattr(_HIDDEN, name))


# -- numpy -------------------------------------------------------------------------------------------


@functools.cache
def numpy_instances() -> tuple[Any, Any]:
    """Return the hidden instance of `numpy.random` and its replacement."""
    from numpy.random import RandomState, mtrand

    singleton: Any = mtrand._rand

    class ThreadRandomState(RandomState):
        def __getattribute__(self, name: str) -> Any:
            mine = now.generators
            if mine is GLOBALS:
                return getattr(singleton, name)
            if name in _RESEEDING:
                mine.reseeded.add(NUMPY)
            return getattr(mine.array, name)

    return singleton, ThreadRandomState()


def _install_numpy(patch: Patch) -> None:
    # Not `np.random`, which numpy does not have yet at the end of that module's import.
    numpy_random, mtrand = map(importlib.import_module, ("numpy.random", "numpy.random.mtrand"))
    singleton, replacement = numpy_instances()
    patch(mtrand, "_rand", replacement)  # `seed`, `ranf` and `sample` look there themselves
    for home in (numpy_random, mtrand):
        for name, function in list(vars(home).items()):
            if getattr(function, "__self__", None) is singleton:
                patch(home, name, _numpy_function(function, name))


def _numpy_function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def shim(*args: Any, **kwargs: Any) -> Any:
        mine = now.generators
        if mine is GLOBALS:
            return function(*args, **kwargs)
        if name in _RESEEDING:
            mine.reseeded.add(NUMPY)
        return getattr(mine.array, name)(*args, **kwargs)

    return shim


# -- torch -------------------------------------------------------------------------------------------

_FUNCTIONS = """
    rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson
    binomial _standard_gamma _sample_dirichlet
"""
_METHODS = """
    uniform_ normal_ random_ bernoulli_ bernoulli cauchy_ exponential_ geometric_ log_normal_ multinomial
"""
"""Functions of torch, and methods of its tensors, that take a generator."""


_WITHOUT = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax
    fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices scaled_dot_product_attention multi_head_attention_forward
    dropout_ alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout_
    lstm gru rnn_tanh rnn_relu
"""
"""Functions of torch and `torch.nn.functional` that draw and take no generator."""

_LIKE = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
"""Functions that take no generator in some versions of torch, and the method with which each draws."""


@functools.cache
def mode_class() -> Any:
    """Return the class of the mode in which torch's functions use a thread's generator."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from hybridloader._support.installed_torch import takes_generator

    named = {getattr(torch, name): takes_generator(name) for name in _FUNCTIONS.split()}
    takes = {function for function, taken in named.items() if taken}
    takes |= {getattr(torch.Tensor, name, None) for name in _METHODS.split()}
    # These Python functions must be listed: the mode is off within a function that it handles.
    for function in vars(torch.nn.init).values():
        if inspect.isfunction(function) and "generator" in inspect.signature(function).parameters:
            takes.add(function)
    homes = torch, torch.nn.functional
    without = {getattr(home, name, None) for home in homes for name in _WITHOUT.split()}
    without |= named.keys() - takes
    default, seeded = torch.default_generator, torch.Tag.nondeterministic_seeded

    class Within(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Mode within a function that takes no generator: passes one to each operation that draws.

        The mode is entered through torch's C functions, because torch's `__enter__` also sets a flag of
        the whole process, which `torch.compile` reads. Only one thread at a time is in the mode: torch
        fails if two threads are the first to run an operator in one (an assertion in
        ``PyHandleCache.h``, seen on Python 3.13t in 2 of 8 runs).
        """

        def __init__(self, mine: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._mine = mine

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # otherwise the first operation imports torch.compile, which takes 1 s

        def __enter__(self) -> Any:
            self._lock = installation.dispatching
            self._lock.acquire()
            torch._C._push_on_torch_dispatch_stack(self)
            return self

        def __exit__(self, *exc: object) -> None:
            torch._C._pop_torch_dispatch_stack(None)
            self._lock.release()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            drawing, place = _with_generator(func)
            given = kwargs.get("generator") or (args[place] if len(args) > place else None)
            draws = drawing is not None and seeded in func.tags
            if draws and given is None and _on_cpu(args, kwargs):
                args, func = args[:place], drawing
                kwargs = {**kwargs, "generator": self._mine.tensor}
            return func(*args, **kwargs)

    class Mode(TorchFunctionMode):
        def __init__(self, mine: Any) -> None:
            super().__init__()
            self._mine = mine
            # Like `__enter__` and `__exit__`, with four calls fewer per batch.
            self.begin = functools.partial(torch._C._push_on_torch_function_stack, self)
            self.end = torch._C._pop_torch_function_stack

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in takes:
                kwargs = kwargs or {}
                given = kwargs.get("generator")
                if (given is None or given is default) and _on_cpu(args, kwargs):
                    kwargs = {**kwargs, "generator": self._mine.tensor}
                return func(*args, **kwargs)
            # With other generators in place, a sample within this one has handled the call.
            if now.generators is not self._mine or func not in without:
                return func(*args, **kwargs) if kwargs else func(*args)
            with Within(self._mine):
                return func(*args, **(kwargs or {}))

    return Mode


@functools.cache
def _with_generator(operation: Any) -> tuple[Any, int]:
    """Return the form of a torch operation that takes a generator, and the argument's position.

    The form is None if there is none. Generators are the last argument.
    """
    packet, wanted = operation.overloadpacket, _parameters(operation)
    for overload in (operation, *(getattr(packet, name) for name in packet.overloads())):
        found = _parameters(overload)
        if "generator" in found and {**found, "generator": None} == {**wanted, "generator": None}:
            return overload, [*found].index("generator")
    name = packet.__name__
    return (functools.partial(_draw_like, _LIKE[name]) if name in _LIKE else None), sys.maxsize


def _parameters(operation: Any) -> dict[str, str]:
    return {each.name: str(each.type) for each in operation._schema.arguments}


def _draw_like(method: str, like: Any, *bounds: Any, generator: Any, **options: Any) -> Any:
    """Draw numbers for a tensor like another one in the way torch does.

    `bounds` are those of `randint_like`, which torch draws from 0 on if it has one.
    """
    made = sys.modules["torch"].empty_like(like, **options)
    if len(bounds) == 1:
        bounds = 0, *bounds
    return getattr(made, method)(*bounds, generator=generator)


def _on_cpu(args: Any, kwargs: Any) -> bool:
    """Return True if a call makes or changes tensors of the CPU."""
    device, torch = kwargs.get("device"), sys.modules["torch"]
    if device is None and args:
        device = attribute(args[0], "device")
    if device is None and torch._C._is_torch_function_mode_enabled():
        from hybridloader._support.installed_torch import default_device

        device = default_device()
    return device is None or str(device).partition(":")[0] == "cpu"


@functools.cache
def _calling(place: str, name: str, parameters: str) -> types.CodeType:
    """Return the code of a function that calls the global `place` with its own parameters.

    They are those of the replaced code. Without a GIL, Python may read the code of a function, read it
    again after another thread has replaced it, and take the number of parameters from the second.
    """
    source = f"def {name}({parameters}): return {place}({parameters})"
    (code,) = (
        one
        for one in compile(source, __file__, "exec").co_consts
        if isinstance(one, types.CodeType)
    )
    return code


def _install_torch(patch: Patch) -> None:
    """Replace the code of functions, not their names, so that names imported earlier change too."""
    import torch

    def shim(before: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            mine = now.generators
            if mine is GLOBALS:
                return before(*args, **kwargs)
            if before.__name__ in ("manual_seed", "seed", "set_rng_state"):
                mine.reseeded.add("torch")
            return instead(mine.tensor, *args, **kwargs)

        return act

    def set_state(mine: Any, new_state: Any) -> None:
        mine.set_state(new_state)

    generator: Any = torch.Generator
    for name, instead in {
        "manual_seed": lambda mine, seed: mine.manual_seed(int(seed)),
        "seed": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": generator.get_state,
        "set_rng_state": set_state,
    }.items():
        function, place = getattr(torch.random, name), f"_hybridloader_{name}"
        if place not in function.__globals__:
            before = types.FunctionType(function.__code__, function.__globals__, name)
            # Never removed: a call on another thread must not find new code without it.
            function.__globals__[place] = shim(before, instead)
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        patch(function, "__code__", _calling(place, name, ", ".join(parameters)))


# -- installation -------------------------------------------------------------------------------------

_INSTALL = {NUMPY: _install_numpy, "torch": _install_torch}


class _Installation:
    """The patches, installed while at least one user holds them."""

    def __init__(self) -> None:
        # All the mutable state:
        self._lock = threading.RLock()
        self.dispatching = threading.RLock()  # held by the thread that is in torch's mode `Within`
        self.count = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # object, name, value before and now
        self.done: set[str] = set()
        self._awaited: set[str] = set()

    def take(self) -> None:
        with self._lock:
            self.count += 1
            if self.count > 1:
                return
            _install_random(self._patch)
            for name in _INSTALL:
                if name in sys.modules:
                    self._install(name)
                elif name not in self._awaited:
                    self._awaited.add(name)
                    when_imported(name, functools.partial(self._install, name))

    def give_back(self) -> None:
        with self._lock:
            self.count -= 1
            if not self.count:
                for home, name, before, value in reversed(self._replaced):
                    if (
                        getattr(home, name, None) is value
                    ):  # otherwise other code has replaced it since
                        setattr(home, name, before)
                self._replaced.clear()
                self.done.clear()

    def _patch(self, home: Any, name: str, value: Any) -> None:
        self._replaced.append((home, name, getattr(home, name), value))
        setattr(home, name, value)

    def _install(self, name: str) -> None:
        with self._lock:
            if self.count and name not in self.done:
                self.done.add(name)
                _INSTALL[name](self._patch)

    def forked(self) -> None:
        """Drop, in the child of a fork, the locks of threads that exist only in the parent."""
        self._lock, self.dispatching = threading.RLock(), threading.RLock()


installation = _Installation()
system.at_fork(after_in_child=installation.forked)
