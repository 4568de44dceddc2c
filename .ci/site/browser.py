#!/usr/bin/env python3
"""Open every page of a built site in a browser, and report problems that only show there.

    pip install playwright && python .ci/site/browser.py SITE [CHROMIUM]

Each page is opened at the widths of a desktop and a phone, in light and dark. Reported are pages wider
than the screen, pictures that do not load, blocks of code without a button that copies them, blocks of
88 columns that do not fit a desktop's page, errors of scripts, and requests to other servers. `.ci/run`
does not run this: it needs Chromium.
"""

import sys
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS = {"desktop": 1280, "phone": 390}
DESKTOP = {"width": WIDTHS["desktop"], "height": 900}
LOOK = """() => {
    const wide = document.documentElement.scrollWidth - window.innerWidth;
    const shown = (node) => node.offsetParent !== null;
    const blocks = [...document.querySelectorAll("article pre > code")].filter(shown);
    const copied = (block) => block.closest("pre").querySelector("button, nav") !== null
        || block.closest(".highlight")?.querySelector("[data-clipboard-target], .md-code__nav");
    return {
        wide,
        pictures: [...document.images].filter((i) => !(i.complete && i.naturalWidth)).map((i) => i.src),
        uncopied: blocks.filter((block) => !copied(block)).length,
        blocks: blocks.length,
        cut: blocks.filter((block) => block.scrollWidth > block.clientWidth
            && block.textContent.split("\\n").every((line) => line.length <= 88)).length,
    };
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def problems(page: Page, address: str, seen: Counter[str]) -> list[str]:
    """Open a page, and return a line for each problem."""
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(f"script: {error}"))
    page.on(
        "request",
        lambda request: (
            found.append(f"request: {request.url}")
            if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:"))
            else None
        ),
    )
    page.goto(address)
    page.wait_for_load_state("load")
    page.wait_for_timeout(50)  # the theme's script adds the buttons
    look = page.evaluate(LOOK)
    seen["pages"] += 1
    seen["blocks of code"] += look["blocks"]
    if look["wide"] > 0:
        found.append(f"{look['wide']} px wider than the screen")
    if look["cut"] and page.viewport_size == DESKTOP:
        found.append(f"{look['cut']} blocks of 88 columns are wider than their boxes")
    if look["uncopied"]:
        found.append(f"{look['uncopied']} blocks of code without a button")
    return [*found, *(f"picture: {source}" for source in look["pictures"])]


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    chromium = sys.argv[2] if len(sys.argv) > 2 else None
    seen: Counter[str] = Counter()
    bad = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        for name, width in WIDTHS.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": width, "height": 900}, color_scheme=scheme
                )
                for path in sorted(site.rglob("*.html")):
                    page = context.new_page()
                    local = path.relative_to(site).as_posix()
                    address = f"http://127.0.0.1:{server.server_port}/{local}"
                    for problem in dict.fromkeys(problems(page, address, seen)):
                        bad += 1
                        print(f"{local} ({name}, {scheme}): {problem}")
                    page.close()
                context.close()
    print(", ".join(f"{count} {name}" for name, count in seen.items()), f"{bad} problems", sep="; ")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
