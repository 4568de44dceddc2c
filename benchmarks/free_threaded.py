"""``python -m benchmarks.free_threaded``: threads beside processes, with and without a GIL.

Run it with both Pythons in the same hour, and compare. It needs torch, numpy, pillow and psutil alone.
"""

from __future__ import annotations

import sys

from benchmarks.__main__ import main
from benchmarks.cases import FREE_THREADED

if __name__ == "__main__":
    sys.exit(main(["--case", *FREE_THREADED, "--no-rivals", *sys.argv[1:]]))
