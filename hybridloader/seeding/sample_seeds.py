"""Seeds of samples under ``seeding="sample"``: hashes of (seed, epoch, stage, sample).

A seed does not depend on where or when its sample is made. This module draws nothing and touches no
generator. It does not use Python's `hash`, because each process salts it differently.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import pathlib
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from hybridloader._support.arguments import policy, whole
from hybridloader._support.user_objects import attribute


@dataclass(frozen=True)
class SampleSeeding:
    """Seeding by which a sample's random numbers depend only on seed, epoch, stage and sample.

    Parameters
    ----------
    seed
        Seed of all samples. None: the seed is drawn where torch draws the seed of its workers, so
        ``torch.manual_seed`` determines it.

    Examples
    --------
    >>> from hybridloader import DataLoader, SampleSeeding
    >>> loader = DataLoader(range(4), seeding=SampleSeeding(seed=7))
    """

    seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            instead = "torch takes -2**63 to 2**64 - 1"
            whole("SampleSeeding: seed", self.seed, -(2**63), 2**64 - 1, instead)


def parse_seeding(value: Any, name: str = "seeding") -> SampleSeeding | str | None:
    """Check a value of `seeding`; return a policy, ``"worker"``, ``"shared"`` or None.

    Raises `ValueError` for other values.
    """
    if value is None or (isinstance(value, str) and value in ("worker", "shared")):
        return value
    choices = 'None (by place), "worker" (as torch), "sample", "shared" or a SampleSeeding'
    hint = f"; for a seed write SampleSeeding(seed={value})" if type(value) is int else ""
    words = {"sample": SampleSeeding}
    return policy(name, value, words, (SampleSeeding,), choices, hint)


class Kind(enum.Enum):
    """Kind of seeding of a stage that does not simply draw from the generators of its process."""

    SAMPLE = "sample"
    """The user asked for seeding by sample. Each function of a stage is seeded separately too."""
    PLACE = "place"
    """Each sample is seeded because the stage is on threads. `worker_init_fn` may seed instead."""
    WORKER = "worker"
    """Each worker on threads is seeded once, as torch seeds its processes."""


@dataclass(frozen=True)
class Origin:
    """Origin of the seeds of all samples of a running stage; sent to its workers."""

    seed: int  # of the loader or of the run
    epoch: int = 0  # number of the epoch
    stages: tuple[str, ...] = ("",)  # one name for each function of the stage, which seeds it
    any_thread: bool = False  # an inline worker may run on any thread, so it borrows no generators
    kind: Kind = Kind.SAMPLE


def origin_of(
    value: Any,  # of `seeding`
    seed: int,  # for a policy without one
    *,
    threads: bool,  # workers are threads of one process
    several: bool = False,  # several threads of a worker make samples
    stages: tuple[str, ...] = ("",),
    epoch: int = 0,
    any_thread: bool = False,
) -> Origin | None:
    """Return the origin of a stage's seeds; None if its samples draw from the global generators."""
    chosen = parse_seeding(value)
    if isinstance(chosen, SampleSeeding):
        seed = seed if chosen.seed is None else chosen.seed
        return Origin(seed, epoch, stages, any_thread)
    if chosen is None and (threads or several):
        return Origin(seed, epoch, stages, any_thread, Kind.PLACE)
    if chosen == "worker" and threads and not several:
        return Origin(seed, epoch, stages, any_thread, Kind.WORKER)
    return None


class SeedTriple(NamedTuple):
    """Seeds of one sample."""

    python: int  # 128 bits, for `random`
    numpy: int | list[int]  # 32 bits: more take numpy 11 us, not 2, most of it to check the array
    torch: int  # 63 bits, of which torch's generator for the CPU uses the lowest 32


def root(origin: Origin, stage: str) -> Any:
    """Return the hash of seed, epoch and stage. blake2b mixes keys of any length, in under 1 us."""
    parts = _framed((origin.seed, origin.epoch, stage))
    return blake2b(parts, digest_size=32, person=b"hybridloader-1")


def seeds(digest: bytes) -> SeedTriple:
    number = int.from_bytes
    python, numpy = number(digest[:16], "little"), number(digest[16:20], "little")
    # Not SeedTriple(...), which takes as long as the rest of this function.
    return tuple.__new__(SeedTriple, (python, numpy, number(digest[24:], "little") >> 1))


def own_seeds(digest: bytes) -> SeedTriple:
    """Return the seeds of the generators of `rng`; the global generators get other seeds."""
    return seeds(blake2b(digest, digest_size=32, person=b"hybridloader-rng").digest())


def key_of(index: Any) -> bytes:
    """Return bytes that identify `index` and are the same in every process.

    Equal ints of any type have equal keys (``np.int64(3)``, ``torch.tensor(3)``). Raises `TypeError`
    for types without such bytes.
    """
    if type(index) is int:
        return b"i%d" % index
    if isinstance(index, str) and not isinstance(index, enum.Enum):
        return b"s" + index.encode("utf-8", "surrogatepass")
    return _other_key(index)


def _other_key(index: Any) -> bytes:
    if isinstance(index, enum.Enum):
        return b"e" + _framed((type(index).__qualname__, index.name))
    if isinstance(index, bool) or index is None or index is Ellipsis:
        return b"c" + repr(index).encode()
    if isinstance(index, (bytes, bytearray)):
        return b"b" + bytes(index)
    if isinstance(index, float):
        return b"f" + float(index).hex().encode()
    if isinstance(index, complex):
        return b"z" + repr(complex(index)).encode()
    if isinstance(index, tuple):
        return b"t" + _framed(index)
    if isinstance(index, list):
        return b"l" + _framed(index)
    if isinstance(index, slice):
        return b"S" + _framed((index.start, index.stop, index.step))
    if isinstance(index, (set, frozenset)):
        return b"u" + _joined(sorted(map(key_of, index)))
    if isinstance(index, dict):
        return b"d" + _framed(pair for pair in index.items())
    if isinstance(index, pathlib.PurePath):
        return b"p" + str(index).encode("utf-8", "surrogatepass")
    if dataclasses.is_dataclass(index) and not isinstance(index, type):
        fields = [getattr(index, field.name) for field in dataclasses.fields(index)]
        return b"D" + _framed((type(index).__qualname__, *fields))
    try:
        return b"i%d" % operator.index(index)
    except TypeError:
        pass
    listed = attribute(index, "tolist")  # an array, or a tensor
    if callable(listed) and not isinstance(index, type):
        return b"a" + key_of(listed())
    raise TypeError(
        f'seeding="sample" seeds a sample by its index, and a {type(index).__qualname__} has nothing '
        f"that would be the same in every process ({index!r}). Give ints, str, bytes, tuples or "
        "dataclasses of these as indices"
    )


def _framed(parts: Any) -> bytes:
    return _joined(map(key_of, parts))


def _joined(keys: Any) -> bytes:
    return b"".join(b"%d:%b" % (len(key), key) for key in keys)
