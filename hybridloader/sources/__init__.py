"""Data in files, archives and tables, as datasets whose samples are found by number.

Names are imported when they are first used. Libraries for a store are imported when it is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily

if TYPE_CHECKING:
    from hybridloader.sources.files import Files as Files
    from hybridloader.sources.parquet import Parquet as Parquet
    from hybridloader.sources.per_worker import PerWorker as PerWorker
    from hybridloader.sources.shards import Shards as Shards
    from hybridloader.sources.tar import Tar as Tar
    from hybridloader.sources.writing import write_shards as write_shards

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "files": "Files",
        "parquet": "Parquet",
        "per_worker": "PerWorker",
        "shards": "Shards",
        "tar": "Tar",
        "writing": "write_shards",
    },
)
