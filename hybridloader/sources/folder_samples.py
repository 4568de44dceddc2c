"""`FolderSamples`: the files of a folder, grouped into samples to write into shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridloader.errors import SourceError
from hybridloader.sources.indexing import name_parts
from hybridloader.sources.listing import Urls, list_files
from hybridloader.sources.shard_files import KEY
from hybridloader.sources.store import Store


class FolderSamples:
    """Samples as dicts of bytes by extension: files whose names agree up to the first dot are one.

    Parameters
    ----------
    urls, storage_options
        See `Files`.
    classes
        True adds ``cls``: the number of the first folder below the folder of `urls`, sorted by name.

    Attributes
    ----------
    ignored : int
        Number of files that are no sample's: hidden, or without an extension.
    """

    def __init__(
        self,
        urls: Urls,
        *,
        classes: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.ignored = 0
        groups: dict[str, dict[str, tuple[Store, str, int]]] = {}
        roots, stores = list_files(urls, storage_options or {})
        for root, store in zip(roots, stores, strict=True):
            for path, size in zip(root.paths, root.sizes, strict=True):
                parts = name_parts(path[len(root.folder) :].lstrip("/"))
                if parts is None:
                    self.ignored += 1
                    continue
                files = groups.setdefault(parts[0], {})
                if parts[1] in files:
                    raise SourceError(
                        f"{files[parts[1]][1]} and {path} are both {'.'.join(parts)}, so one would be "
                        "lost; pack their folders separately"
                    )
                files[parts[1]] = store, path, size
        self._samples = [*groups.items()]
        self.classes: list[str] = []
        if classes:
            self.classes = sorted({_class_of(key) for key in groups})

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        key, files = self._samples[index]
        sample: dict[str, Any] = {KEY: key}
        for extension, (store, path, size) in files.items():
            sample[extension] = store.read(path, size)
        if self.classes:
            sample["cls"] = self.classes.index(_class_of(key))
        return sample


def _class_of(key: str) -> str:
    name, slash, _ = key.partition("/")
    if not slash:
        raise SourceError(
            f"the files {key}.* are in no class folder; move them into a folder below the packed one"
        )
    return name
