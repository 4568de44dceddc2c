"""Process that measures one loader: reads one command a line, obeys, writes one answer a line.

The main script of every process that workers are started from. multiprocessing's spawn imports it
again in each worker, so nothing else is imported at the top: a worker imports what its loader needs.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Serve until the harness closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a library must not look like an answer
    import importlib

    from benchmarks.case import CannotDo

    for module in ("datasets.catalogue", "loaders.opening", "registry"):
        importlib.import_module(f"benchmarks.{module}")  # so that no measurement waits for it

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        where, _, name = command["measure"].partition(":")
        try:
            measure = getattr(importlib.import_module(where), name)
            answer = measure(command["loader"], command["spec"])
        except CannotDo as error:
            answer = {"skipped": str(error)}
        except Exception as error:
            import traceback

            traceback.print_exc()
            # torch puts the worker's traceback into the message: its first and last line say it.
            said = str(error).strip().splitlines() or [""]
            text = " ... ".join(dict.fromkeys((said[0], said[-1])))
            answer = {"skipped": f"{type(error).__name__}: {text}", "failed": True}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
