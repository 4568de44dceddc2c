"""What keeps a dataset's millions of records once, and what finds those that are not kept so.

Nothing is done here; the parts lie in modules of their own.
"""

from __future__ import annotations

from hybridloader.records.large import hint_at_large_container, largest_container
from hybridloader.records.shared_dict import SharedDict
from hybridloader.records.shared_list import SharedList

__all__ = ["SharedDict", "SharedList", "hint_at_large_container", "largest_container"]
