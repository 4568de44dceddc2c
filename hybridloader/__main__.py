"""``python -m hybridloader``: the command line, for where its script is not on the path."""

from __future__ import annotations

import sys

from hybridloader.cli import main

if __name__ == "__main__":
    sys.exit(main())
