"""Read-only containers of millions of records, which all processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily

if TYPE_CHECKING:
    from hybridloader.records.containers import SharedDict as SharedDict
    from hybridloader.records.containers import SharedList as SharedList

__getattr__, __dir__, __all__ = lazily(__name__, {"containers": "SharedDict SharedList"})
