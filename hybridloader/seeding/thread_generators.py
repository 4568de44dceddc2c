"""Patches that let `random`, `numpy.random` and torch use a thread's generators, not the global ones.

The patches are installed only while workers on threads seed their samples or run their `init_fn`.
docs/randomness.md lists the functions that each patch covers. A function that C code holds still draws
from the global generators. The class of `random`'s one instance is exchanged, since functions of it are
imported by name. numpy's is an object of C, so its functions are replaced; torch has a mode for each
thread. Threads that make no sample draw from the global generators as before. This module never changes
the state of a global generator.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any, TypeVar

from hybridloader._support import system
from hybridloader._support.torch_env import when_imported
from hybridloader._support.user_objects import attribute
from hybridloader.seeding.sample_rng import (
    GLOBALS,
    NUMPY,
    OPEN,
    SAMPLE,
    Key,
    Kind,
    Origin,
    SampleRng,
    SeedTriple,
    key_of,
    now,
    seeds,
)

T = TypeVar("T")

Patch = Callable[[Any, str, Any], None]
"""Function that replaces an attribute (object, name, new value) until the patches are removed."""


# -- random ------------------------------------------------------------------------------------------

_HIDDEN: random.Random = random._inst

_IN_C = ("random", "getrandbits", "seed", "getstate", "setstate")
"""Names of the functions of `random` that are methods written in C, or overridden."""

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


_LIKE = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
"""Functions that take no generator in some versions of torch, and the method with which each draws."""


@functools.cache
def mode_class() -> Any:
    """Return the class of the mode in which torch's functions use a thread's generator."""
    import torch
    from torch.overrides import TorchFunctionMode

    from hybridloader._support.installed_torch import takes_generator

    # For each function, one that draws as it does, from the generator that is passed to it.
    drawing: dict[Any, Callable[..., Any]] = {
        getattr(torch, name): functools.partial(_draw_like, _LIKE[name]) for name in _LIKE
    }
    takes = [getattr(torch, name) for name in _FUNCTIONS.split() if takes_generator(name)]
    takes += [getattr(torch.Tensor, name) for name in _METHODS.split()]
    # These Python functions must be listed: the mode is off within a function that it handles.
    for function in vars(torch.nn.init).values():
        if inspect.isfunction(function) and "generator" in inspect.signature(function).parameters:
            takes.append(function)
    drawing.update(zip(takes, takes, strict=True))
    default = torch.default_generator

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
            kwargs = kwargs or {}
            draw = drawing.get(func)
            if draw is not None:
                given = kwargs.get("generator")
                if (given is None or given is default) and _on_cpu(args, kwargs):
                    return draw(*args, **{**kwargs, "generator": self._mine.tensor})
            return func(*args, **kwargs)

    return Mode


def _draw_like(
    method: str,
    input: Any,
    *bounds: Any,
    generator: Any,
    requires_grad: bool = False,
    **options: Any,
) -> Any:
    """Draw numbers for a tensor like `input` in the way torch does; `bounds` are `randint_like`'s."""
    bounds += tuple(options.pop(name) for name in ("low", "high") if name in options)
    made = sys.modules["torch"].empty_like(input, **options)
    return getattr(made, method)(*bounds, generator=generator).requires_grad_(requires_grad)


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
    constants = compile(source, __file__, "exec").co_consts
    return next(one for one in constants if isinstance(one, types.CodeType))


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
        self._lock = system.renewed_in_forks(threading.RLock())
        self.count = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # object, name, value before and now
        self.done: set[str] = set()
        self._awaited: set[str] = set()

    def take(self) -> None:
        with self._lock:
            self.count += 1
            if self.count > 1:
                return
            self._patch(_HIDDEN, "__class__", _ThreadRandom)
            for name in _IN_C:
                self._patch(random, name, getattr(_HIDDEN, name))
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
                    # Otherwise other code has replaced it since.
                    if getattr(home, name, None) is value:
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


installation = _Installation()


# -- generators of a thread, seeded when a sample first draws: one that draws nothing is not slowed


LIBRARIES: dict[str, tuple[Callable[[], Any], Callable[[Any, SeedTriple], Any]]] = {
    "random": (random.Random, lambda made, found: made.seed(found.python)),
    NUMPY: (
        lambda: importlib.import_module(NUMPY).RandomState(),
        lambda made, found: made.seed(found.numpy),
    ),
    "torch": (
        lambda: importlib.import_module("torch").Generator(),
        lambda made, found: made.manual_seed(found.torch),
    ),
}
"""For each library, the functions that make a generator and that seed it."""


class ThreadGenerators:
    """Generators of one thread that replace the global ones.

    A generator is made, and seeded for the current sample, on first access. The current sample is the
    one that `kind` and `key` name or, with `walk`, the item that this iterator returned last.
    """

    def __init__(self) -> None:
        # Libraries that user code has seeded or given a state:
        self.reseeded: set[str] = set()
        # Mode in which torch's functions use `tensor`; None: torch is not imported.
        self.mode: Any = None
        self._made: dict[str, Any] = {}  # generators, by library
        # All the other mutable state: the generators that these replace, ...
        self.outer: Any = GLOBALS
        # ... and that of the current sample:
        self.rng: ThreadSampleRng | None = None
        self.kind = b""
        # Of one sample; with `walk`, a function of the place, or None: items are indices.
        self.key: Any = None
        self.walk: Any = None  # iterator over `items`, each of which is a sample
        self.items: Any = ()
        self.place = 0  # of the current sample; -1: not looked up yet
        self.own: Any = None  # generators of `rng()`
        self._digest: bytes | None = None
        self._seeds: SeedTriple | None = None
        self._seeded: set[str] = set()  # libraries whose generator is seeded for this sample

    # -- the current sample -----------------------------------------------------------------------------

    def seed(self, python: int, array: int | list[int], tensor: int) -> None:
        """Seed all generators; valid until the next sample begins."""
        self._look()
        self._forget()
        self._seeds = SeedTriple(python, array, tensor)

    def _forget(self) -> None:
        self.own = self._digest = self._seeds = None
        self._seeded.clear()

    def _look(self) -> None:
        """Begin the next sample if the list's iterator has advanced: draws alone ask it how far."""
        walk, place = self.walk, 0
        if walk is not None:
            place = max(0, len(self.items) - 1 - length_hint(walk))
        if place != self.place:
            self.place = place
            self._forget()

    @property
    def digest(self) -> bytes | None:
        """Hash of the current sample; None if the user did not ask for seeds by sample."""
        rng = self.rng
        return self._hash() if rng is not None and rng.origin.kind is Kind.SAMPLE else None

    def _hash(self) -> bytes:
        self._look()
        if self._digest is None:
            rng, key = self.rng, self.key
            assert rng is not None
            if self.walk is not None:
                key = rng.key_of(self.items[self.place]) if key is None else key(self.place)
            elif not isinstance(key, bytes):
                key = key()
            self._digest = rng.digest(self.kind, key)
        return self._digest

    def _generator(self, library: str) -> Any:
        self._look()
        rng = self.rng
        if rng is not None and rng.kept is not None and library in rng.kept.reseeded:
            return rng.kept._generator(library)
        if library not in self._seeded:
            self._seeded.add(library)
            make, seed = LIBRARIES[library]
            if library not in self._made:
                self._made[library] = make()
            if self._seeds is None:
                self._seeds = seeds(self._hash())
            seed(self._made[library], self._seeds)
        return self._made[library]

    # -- generators ------------------------------------------------------------------------------------

    @property
    def python(self) -> Any:
        """A `random.Random`."""
        return self._generator("random")

    @property
    def array(self) -> Any:
        """A `numpy.random.RandomState`."""
        return self._generator(NUMPY)

    @property
    def tensor(self) -> Any:
        """A `torch.Generator`, for the CPU."""
        return self._generator("torch")

    @property
    def generator(self) -> Any:
        """A `numpy.random.Generator` on the bit generator of `array`, and so with the same seed."""
        from numpy.random import Generator

        return Generator(self.array._bit_generator)

    # -- in place of the global ones -------------------------------------------------------------------

    def put(self) -> None:
        """Replace the generators that this thread uses by these."""
        mode = self.mode
        if mode is None and "torch" in sys.modules:
            self.mode = mode = mode_class()(self)
        self.outer, now.generators = now.generators, self
        if mode is not None:
            mode.begin()

    @contextmanager
    def in_place(self, found: SeedTriple) -> Iterator[None]:
        """Replace the global generators on this thread during the block, seeded with `found`."""
        installation.take()
        self.put()
        try:
            self.seed(*found)
            yield
        finally:
            if self.mode is not None:
                self.mode.end()
            now.generators = self.outer
            installation.give_back()


_INFO = {"random_generator": "python", "torch_generator": "tensor", "numpy_generator": "generator"}


class _ThreadInfoRng:
    """`WorkerInfo.rng` on threads: the sample's generators; between samples, those of `outside`."""

    def __init__(self, outside: Any) -> None:
        self._outside = outside

    def __getattr__(self, name: str) -> Any:
        if name not in _INFO:
            raise AttributeError(name)
        mine = now.generators
        return getattr(self._outside, name) if mine is GLOBALS else getattr(mine, _INFO[name])


class ThreadSampleRng(SampleRng):
    """Gives each thread separate generators while it makes a sample. See `SampleRng`."""

    seeds_in_turn = True

    def __init__(self, origin: Origin, worker: int, number: int = 0) -> None:
        self._end: Any = None
        self.by_function = origin.kind is Kind.SAMPLE
        super().__init__(origin, worker, number)

    def prepare(self) -> None:
        installation.take()
        self._end = weakref.finalize(self, installation.give_back)
        self._end.atexit = False

    def release(self) -> None:
        if self._end is not None:
            self._end()

    def info_rng(self, without: Any) -> Any:
        in_turn = without is None or self.origin.kind is Kind.WORKER
        return without if in_turn else _ThreadInfoRng(without)

    def key_of(self, index: Any) -> bytes:
        try:
            return key_of(index)
        except TypeError:
            if self.origin.kind is Kind.SAMPLE:
                raise
            return b"p" + pickle.dumps(index)  # seeds were not asked for: accept any index

    # -- seeded calls ----------------------------------------------------------------------------------

    def call(self, kind: bytes, key: Key, function: Callable[..., T], *arguments: Any) -> T:
        spare = now.spare
        mine = spare.pop() if spare else ThreadGenerators()
        mine.rng, mine.kind, mine.key, mine.place = self, kind, key, -1
        item = now.item
        if mine.mode is None:
            mine.put()
        else:  # `put`, inlined
            mine.outer, now.generators = now.generators, mine
            mine.mode.begin()
        try:
            return function(*arguments)
        finally:
            if mine.mode is not None:
                mine.mode.end()
            now.generators, now.item = mine.outer, item
            mine.rng = mine.own = mine.key = None
            spare.append(mine)

    def enter(
        self, items: Sequence[Any], key: Callable[[int], bytes] | None = None
    ) -> Iterator[Any]:
        if type(items) not in (list, tuple):
            items = list(items)
        asked = key is None and self.origin.kind is Kind.SAMPLE
        if asked and not {*map(type, items)} <= {int, str}:
            for item in items:
                key_of(item)  # raises for an index without a key, as in a process
        spare = now.spare
        mine = spare.pop() if spare else ThreadGenerators()
        mine.rng, mine.kind, mine.key, mine.items, mine.place = self, SAMPLE, key, items, -1
        mine.walk = walk = iter(items)
        if mine.mode is None:
            mine.put()
        else:  # `put`, inlined: saves a call per batch
            mine.outer, now.generators = now.generators, mine
            mine.mode.begin()
        return walk

    def leave(self) -> None:
        mine = now.generators
        if mine.mode is not None:
            mine.mode.end()
        now.generators = mine.outer
        mine.rng = mine.walk = mine.own = mine.key = mine.items = None
        now.spare.append(mine)

    def seeded(self, function: Callable[[Any], T], kind: bytes = SAMPLE) -> Callable[[Any], T]:
        call, key = self.call, self.key_of
        return lambda index: call(kind, functools.partial(key, index), function, index)

    def seeded_shard(
        self, make: Callable[[], Iterator[Any]], *, entered: bool = False
    ) -> Iterator[Any]:
        if entered:
            return self.call(OPEN, b"%d/" % self.worker, make)
        return super().seeded_shard(make)
