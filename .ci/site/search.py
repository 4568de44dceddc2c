#!/usr/bin/env python3
"""Check that the search of a built site finds the guide for a question first: its own code, in node.

    python .ci/site/search.py SITE             check the queries below
    python .ci/site/search.py SITE QUERY...    list the first results of these

Without node it prints so, and checks nothing.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

GUIDES = {
    "resume": "resuming.html",
    "checkpoint": "resuming.html",
    "cuda": "devices.html",
    "prefetch_factor": "tuning.html",
    "too many open files": "troubleshooting.html",
    "weighted sampling": "samplers.html",
    "mix datasets": "mixing.html",
    "worker dies": "faults.html",
    "gpu starvation": "why-is-it-slow.html",
    "quickstart": "quickstart.html",
    "install": "installation.html",
    "notebook": "tutorials/notebook.html",
    "num_workers": "tuning.html",
    "pin_memory": "devices.html",
    "out of memory": "troubleshooting.html",
    "deadlock": "troubleshooting.html",
    "hang": "troubleshooting.html",
    "multi gpu": "distributed.html",
    "seed": "randomness.html",
}
"""Query -> the page that its reader needs."""

HIDDEN = ("decisions.html", "examples/")
"""Pages, or folders of them, that the search must not find."""

SCRIPT = """
const fs = require("fs");
const [worker, index, ...queries] = process.argv.slice(1);
let handle, results = {}, query;
globalThis.self = globalThis;
globalThis.addEventListener = (name, handler) => { handle = handler; };
globalThis.postMessage = ({ type, data }) => { if (type === 3) results[query] = data.items; };
(0, eval)(fs.readFileSync(worker, "utf8"));
(async () => {
  const site = JSON.parse(fs.readFileSync(index, "utf8"));
  await handle({ data: { type: 0, data: { ...site, options: { suggest: false } } } });
  for (query of queries) await handle({ data: { type: 2, data: query } });
  const pages = (groups) => groups.map((items) => items.find((i) => !i.parent).location);
  console.log(JSON.stringify(Object.fromEntries(
    Object.entries(results).map(([name, groups]) => [name, pages(groups)]))));
})();
"""
"""Run the worker of the theme, which a browser would start, on the index of the site."""


def found(site: Path, queries: list[str]) -> dict[str, list[str]]:
    """Return the pages that the search lists for each query, best first."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    index = site / "search" / "search_index.json"
    command = ["node", "-e", SCRIPT, str(worker), str(index), *queries]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return dict(json.loads(done.stdout))


def wrong(site: Path) -> list[str]:
    """Return a line for each query that does not find its guide first, and for each hidden page."""
    docs = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    lines = [
        f"{doc['location']} is in the index" for doc in docs if doc["location"].startswith(HIDDEN)
    ]
    for query, pages in found(site, list(GUIDES)).items():
        if pages[:1] != [GUIDES[query]]:
            lines.append(f"{query!r} finds {', '.join(pages[:4])}, not {GUIDES[query]}")
    return lines


if __name__ == "__main__":
    built, *asked = sys.argv[1:]
    if shutil.which("node") is None:
        print("node is not installed; the search was not checked")
        sys.exit()
    if asked:
        for query, pages in found(Path(built), asked).items():
            print(f"{query}: {', '.join(pages[:8])}")
        sys.exit()
    problems = wrong(Path(built))
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(1 if problems else 0)
