"""A process that measures one loader: reads one command a line, does it, writes one answer a line.

The main script of every process that workers are started from. multiprocessing's spawn imports it
again in each worker, so nothing else is imported at the top: what a worker needs is up to the loader.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Serve until the harness closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    from benchmarks.cases.device import JOBS as devices
    from benchmarks.cases.endurance import JOBS as more
    from benchmarks.cases.overhead import JOBS as overhead
    from benchmarks.cases.resuming import JOBS as resuming
    from benchmarks.cases.seeding import JOBS as seeding
    from benchmarks.loaders.dataloaders import CannotDo
    from benchmarks.measurements import JOBS

    jobs = JOBS | devices | more | overhead | resuming | seeding
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = jobs[command["job"]](command["loader"], command["spec"])
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
