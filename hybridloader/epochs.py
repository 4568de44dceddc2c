"""Which epoch a pass over a loader is: the one that was announced, or the one after the pass before.

Counted beside the loader; what was announced is on it, and goes along. Knows nothing of what an epoch
is for.
"""

from __future__ import annotations

from typing import Any

from hybridloader.beside import Beside
from hybridloader.foreign import attribute

_begun: Beside[int] = Beside()
"""The epoch of the pass that began last, unless another was announced since."""


def announce(loader: Any, epoch: int) -> None:
    """The next pass is `epoch`."""
    loader._epoch = epoch
    _begun.pop(loader, None)


def upcoming(loader: Any) -> int:
    """The epoch of the next pass."""
    return int(_begun[loader] + 1 if loader in _begun else _announced(loader))


def begin(loader: Any) -> int:
    """A pass begins; its epoch."""
    epoch = _begun[loader] = upcoming(loader)
    return epoch


def current(loader: Any) -> int:
    """The epoch of the pass that began last; of the next if there is none."""
    return int(_begun[loader] if loader in _begun else _announced(loader))


def _announced(loader: Any) -> int:
    """0 for a loader of torch's, which nobody can tell an epoch."""
    return int(attribute(loader, "_epoch", 0))
