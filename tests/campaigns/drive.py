"""The page in a real browser against a real server of two stages: driven as a person would, with pictures.

    python -m tests.campaigns.drive                          # needs playwright (pip) and Debian's chromium
    python -m tests.campaigns.drive --pictures FOLDER --only chat

Each scene fails by itself, and says why; the exit code is the number of scenes that failed. What must never be seen in
any of them: a message of the Content-Security-Policy, an error in the console, a request to another server.
"""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import sync_playwright

from . import live_scenes, scenes
from .driving import Driven, serving, watched

SCENES: tuple[Callable[[Driven], None], ...] = (
    scenes.first_paint, scenes.chat, scenes.settings_while_an_answer_comes, scenes.stop_and_go_on,
    scenes.looks_of_text, scenes.hostile_text, scenes.library, scenes.keyboard, scenes.widths,
    scenes.long_conversation, scenes.accessible, live_scenes.pipeline, live_scenes.dials, live_scenes.with_a_key,
    live_scenes.hidden_tab, live_scenes.two_chats_lose_a_worker, live_scenes.restart,
)  # fmt: skip


def play(driven: Driven, scene: Callable[[Driven], None]) -> bool:
    """Play one scene on a fresh page; whether all was as it should be."""
    began = time.monotonic()
    driven.complaints.clear()
    driven.page.set_viewport_size({"width": 1280, "height": 800})
    driven.page.goto(driven.url)
    driven.page.reload()
    problem = None
    try:
        driven.ready()
        scene(driven)
    except Exception:  # noqa: BLE001 - the next scene is played in any case
        problem = traceback.format_exc(limit=-2)
        driven.picture(f"failed-{scene.__name__}")
    for complaint in driven.complaints:
        problem = f"{problem or ''}\n{complaint}"
    print(
        f"{'failed' if problem else 'passed'}  {scene.__name__}, {time.monotonic() - began:.1f} s{problem or ''}",
        flush=True,
    )
    return problem is None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--pictures", type=Path, default=Path(tempfile.gettempdir()) / "splitinfer-page")
    parser.add_argument("--only", nargs="*", help="names of scenes")
    parser.add_argument("--axe", type=Path, help="axe.min.js of npm's axe-core")
    options = parser.parse_args()
    if options.axe is not None:
        scenes.AXE.append(options.axe.read_text())
    options.pictures.mkdir(parents=True, exist_ok=True)
    with serving() as (url, server), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        page = browser.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page()
        driven = Driven(page, url, server, options.pictures)
        watched(driven)
        played = [scene for scene in SCENES if not options.only or scene.__name__ in options.only]
        failed = sum(not play(driven, scene) for scene in played)
        browser.close()
    print(f"{failed} of {len(played)} scenes failed; pictures in {options.pictures}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
