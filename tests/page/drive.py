"""The page in a real browser against a real server of two stages: driven as a person would, with pictures.

    python -m tests.page.drive                          # needs playwright (pip) and Debian's chromium
    python -m tests.page.drive --pictures FOLDER --only chat

Each scene fails by itself, and says why; the exit code is the number of scenes that failed. What must never be seen in
any of them: a message of the Content-Security-Policy, an error in the console, a request to another server.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = {"phone": (390, 844), "tablet": (834, 1112), "wide": (1440, 900)}
SECONDS = 60.0
ATTACKS = Path(__file__).parent / "attacks.json"
MARKDOWN = """# A heading

Text with **bold**, *emphasis*, `code`, [a link](https://example.org/) and $e^{i\\pi} + 1 = 0$.

```python
def tale(wolf: str) -> str:
    return f"Once upon a time, {wolf}"
```

| stage | layers |
|---|---|
| studio | 40 |
| mini | 26 |

$$\\sum_{k=1}^{n} k = \\frac{n(n+1)}{2}$$

- [x] done
- [ ] to do

> A quotation.
"""


@dataclass
class Driven:
    """A browser's page, the server's address and process, and what was seen that must not be."""

    page: Page
    url: str
    server: subprocess.Popen[str]
    pictures: Path
    complaints: list[str] = field(default_factory=list)

    def picture(self, name: str) -> None:
        self.page.screenshot(path=str(self.pictures / f"{name}.png"))

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.get_by_role("button", name="Send").click()

    def set(self, **values: str) -> None:
        """Change settings of answers."""
        self.page.locator("details.settings summary").click()
        for name, value in values.items():
            self.page.locator(f'input[name="{name}"]').fill(value)
        self.page.locator("details.settings summary").click()

    def until_idle(self) -> None:
        expect(self.page.get_by_role("button", name="Send")).to_be_visible(timeout=1000 * SECONDS)

    def answers(self) -> Any:
        return self.page.locator("article.assistant")


@contextlib.contextmanager
def serving(*more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server on a free port, with its address."""
    command = [sys.executable, "-m", "splitinfer", "serve", "--layout", "demo.yaml", "--port", "0", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if (found := re.search(r"at (http://\S+)/v1", line)) is not None:
                break
        else:
            raise RuntimeError("the server did not start")
        yield found[1], server
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def watched(driven: Driven) -> None:
    """Note what must not be seen."""
    allowed = driven.url

    def asked(request: Any) -> None:
        if not request.url.startswith((allowed, "blob:", "data:")):
            driven.complaints.append(f"a request to {request.url}")

    driven.page.on("request", asked)
    driven.page.on("pageerror", lambda error: driven.complaints.append(f"an error: {error}"))
    driven.page.on("console", lambda message: message.type == "error" and _is_ours(message.text) and
                   driven.complaints.append(f"the console: {message.text}"))  # fmt: skip
    driven.page.on("dialog", lambda dialog: (driven.complaints.append(f"a dialog: {dialog.message}")
                                             if not dialog.message.startswith(("Remove", "Title")) else None,
                                             dialog.accept()))  # fmt: skip


def _is_ours(text: str) -> bool:
    return "ERR_CONNECTION_REFUSED" not in text and "status of 401" not in text and "ERR_INCOMPLETE" not in text


# -- scenes ----------------------------------------------------------------------------------------


def chat(driven: Driven) -> None:
    """Ask, read, regenerate, edit, branch, stop, go on."""
    page = driven.page
    driven.set(max_tokens="60")
    driven.ask("Tell me of the wolf.")
    driven.until_idle()
    expect(driven.answers()).to_have_count(1)
    figures = driven.answers().locator(".figures").inner_text()
    assert "tokens/s" in figures, figures
    assert "first after" in figures, figures
    driven.picture("chat-answer")
    driven.answers().get_by_role("button", name="Again").click()
    driven.until_idle()
    expect(driven.answers().locator(".branches")).to_contain_text("2 / 2")
    page.get_by_label("Previous branch").click()
    expect(driven.answers().locator(".branches")).to_contain_text("1 / 2")
    page.locator("article.user").hover()
    page.locator("article.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edited text").fill("Tell me of the fox.")
    page.get_by_role("button", name="Ask as a branch").click()
    driven.until_idle()
    expect(page.locator("article.user .branches")).to_contain_text("2 / 2")
    expect(page.locator("article.user")).to_contain_text("fox")
    page.locator("article.user").get_by_label("Previous branch").click()
    expect(page.locator("article.user")).to_contain_text("wolf")
    driven.picture("chat-branches")


def stop_and_go_on(driven: Driven) -> None:
    """An answer that ends at its most tokens goes on where it was."""
    page = driven.page
    page.locator("details.settings summary").click()
    page.locator('input[name="max_tokens"]').fill("8")
    page.locator('input[name="temperature"]').fill("0")
    page.locator('input[name="probabilities"]').check()
    driven.picture("chat-settings")
    page.locator("details.settings summary").click()
    driven.ask("Once upon a time")
    driven.until_idle()
    expect(driven.answers()).to_contain_text("It ends at its most tokens.")
    page.locator(".probabilities summary").click()
    page.locator(".token").first.click()
    expect(page.get_by_label("Likeliest tokens here").locator("tr")).to_have_count(5)
    driven.picture("chat-probabilities")
    before = driven.answers().locator(".markdown").inner_text()
    page.get_by_role("button", name="Go on").click()
    driven.until_idle()
    after = driven.answers().locator(".markdown").inner_text()
    assert after.startswith(before.strip()), (before, after)
    assert len(after) > len(before), (before, after)


def looks_of_text(driven: Driven) -> None:
    """Markdown, code with its button, a table, formulas; in light and dark."""
    _import(driven, [{"role": "user", "content": "Show me."}, {"role": "assistant", "content": MARKDOWN}])
    page = driven.page
    expect(page.locator("math")).to_have_count(2, timeout=1000 * SECONDS)
    expect(page.locator(".code-bar")).to_contain_text("python")
    expect(page.locator("article.assistant a")).to_have_attribute("rel", "noopener noreferrer nofollow")
    page.get_by_role("button", name="Copy this python").click()
    driven.picture("markdown-light")
    page.emulate_media(color_scheme="dark")
    driven.picture("markdown-dark")
    page.emulate_media(color_scheme="light")


def hostile_text(driven: Driven) -> None:
    """Attacks in an answer, in a user's message, a title and a file's name do nothing."""
    attacks = json.loads(ATTACKS.read_text())
    pairs = [[{"role": "user"}, {"role": "assistant", "reasoning_content": attack}] for attack in attacks]
    messages = [{**one, "content": attack} for attack, pair in zip(attacks, pairs, strict=True) for one in pair]
    _import(driven, messages)
    page = driven.page
    while page.locator(".earlier").count():
        page.locator(".earlier").click()
    expect(driven.answers()).to_have_count(len(attacks))
    page.wait_for_timeout(500)
    bad = page.evaluate("""() => [...document.querySelectorAll('.messages *')].filter((one) =>
        ['SCRIPT', 'IFRAME', 'OBJECT', 'EMBED', 'IMG', 'SVG', 'STYLE', 'LINK', 'META', 'BASE', 'FORM', 'INPUT', 'VIDEO',
         'AUDIO'].includes(one.tagName.toUpperCase()) || [...one.attributes].some((each) => /^on/i.test(each.name) ||
         /^\\s*(javascript|data|vbscript):/i.test(each.value))).map((one) => one.outerHTML)""")
    assert not bad, bad[:3]
    assert page.evaluate("window.attacked === undefined")


def library(driven: Driven) -> None:
    """Conversations outlive the page, are found, exported as the REPL reads them, and removed."""
    page = driven.page
    _import(driven, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Of zebras?"},
                     {"role": "assistant", "content": "Striped.", "token_ids": [1, 2]}])  # fmt: skip
    page.reload()
    _open_list(page)
    page.get_by_label("Search conversations").fill("zebras striped")
    expect(page.locator(".sidebar li")).to_have_count(1)
    page.locator(".sidebar .title").click()
    expect(driven.answers()).to_contain_text("Striped.")
    _open_list(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    saved = json.loads(Path(download.value.path()).read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"], saved
    page.locator(".sidebar li").hover()
    page.get_by_label("Remove Of zebras?").click()
    expect(page.locator(".sidebar li")).to_have_count(0)


def keyboard(driven: Driven) -> None:
    """A whole conversation without a mouse."""
    page = driven.page
    page.keyboard.press("Control+Shift+O")
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another.")
    page.keyboard.press("Enter")
    expect(driven.answers()).to_have_count(1, timeout=1000 * SECONDS)
    page.keyboard.press("Escape")
    driven.until_idle()
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.keyboard.press("Escape")


def pipeline(driven: Driven) -> None:
    """The pipeline while it works, at three widths, and what it says."""
    page = driven.page
    driven.set(max_tokens="1500")
    driven.ask("Tell me a long tale of the wolf, the fox and the bear.")
    page.get_by_role("button", name="Pipeline").click()
    expect(page.locator(".stage")).to_have_count(2, timeout=1000 * SECONDS)
    expect(page.locator(".words li")).not_to_have_count(0)
    for name, (width, height) in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(1500)
        driven.picture(f"pipeline-{name}")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(600)
    driven.picture("pipeline-dark")
    page.emulate_media(color_scheme="light")
    label = page.locator(".timeline canvas").get_attribute("aria-label")
    assert label is not None
    assert "front: " in label, label
    page.get_by_role("button", name="Chat").click()


def widths(driven: Driven) -> None:
    """The chat at three widths: nothing is wider than the window."""
    for name, (width, height) in WIDTHS.items():
        driven.page.set_viewport_size({"width": width, "height": height})
        driven.picture(f"chat-{name}")
        assert driven.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


def lost_worker(driven: Driven) -> None:
    """A worker is killed while an answer comes: the chat says so, and the answer goes on to its end."""
    page = driven.page
    driven.set(max_tokens="3000")
    driven.ask("Tell me of the wolf, at length.")
    expect(driven.answers().locator(".markdown")).not_to_be_empty(timeout=1000 * SECONDS)
    workers = [int(pid) for pid in subprocess.run(["ps", "-o", "pid=", "--ppid", str(driven.server.pid)],
               capture_output=True, text=True, check=True).stdout.split()]  # fmt: skip
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    expect(page.locator(".pause")).to_be_visible(timeout=1000 * SECONDS)
    driven.picture("chat-pause")
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    expect(page.locator(".pause")).not_to_be_visible(timeout=1000 * SECONDS)
    page.keyboard.press("Escape")
    driven.until_idle()


def first_paint(driven: Driven) -> None:
    """What a first visit fetches, and when it paints."""
    context = driven.page.context.browser.new_context()  # type: ignore[union-attr]
    page = context.new_page()
    page.goto(driven.url)
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    sent, paint = page.evaluate("""() => [performance.getEntriesByType('resource').concat(
        performance.getEntriesByType('navigation')).reduce((sum, one) => sum + one.transferSize, 0),
        performance.getEntriesByName('first-contentful-paint')[0]?.startTime]""")
    print(f"  first visit: {sent:,} bytes, first paint after {paint:.0f} ms")
    context.close()
    assert sent <= 300_000


def long_conversation(driven: Driven) -> None:
    """5,000 messages: no long task while an answer comes and somebody types."""
    pair = ({"role": "user", "content": "A question."}, {"role": "assistant", "content": MARKDOWN})
    messages = [pair[i % 2] for i in range(5000)]
    _import(driven, messages)
    page = driven.page
    driven.set(max_tokens="200")

    def shortened(route: Any) -> None:
        """Without what came before, as the context is 4,096 tokens."""
        body = json.loads(route.request.post_data)
        route.continue_(post_data=json.dumps({**body, "messages": body["messages"][-1:]}))

    page.route("**/v1/chat/completions", shortened)
    page.evaluate("""() => { window.tasks = []; new PerformanceObserver((list) => list.getEntries().forEach((one) =>
        window.tasks.push(one.duration))).observe({type: 'longtask'}); }""")
    driven.ask("Tell me of the wolf.")
    page.evaluate("""() => {
        window.strokes = [];
        document.querySelector('.composer textarea').addEventListener('keydown', () => {
            const began = performance.now();
            requestAnimationFrame(() => setTimeout(() => window.strokes.push(performance.now() - began)));
        });
    }""")
    page.get_by_label("Message", exact=True).press_sequentially("A text that is typed while an answer comes.", delay=60)
    driven.until_idle()
    page.unroute("**/v1/chat/completions")
    tasks, strokes = page.evaluate("[window.tasks.splice(0), window.strokes.sort((a, b) => a - b)]")
    print(f"  longest task {max(tasks, default=0):.0f} ms; typing p95 {strokes[int(0.95 * len(strokes))]:.0f} ms")


def accessible(driven: Driven) -> None:
    """axe finds nothing serious, in either view and either colour."""
    if AXE is None:
        print("  axe was not given")
        return
    driven.set(max_tokens="400")
    driven.ask("Tell me of the wolf.")
    driven.page.evaluate(AXE)
    found = []
    for view, colour in (("Chat", "light"), ("Chat", "dark"), ("Pipeline", "dark"), ("Pipeline", "light")):
        driven.page.emulate_media(color_scheme=colour)  # type: ignore[arg-type]
        driven.page.get_by_role("button", name=view, exact=True).click()
        driven.page.wait_for_timeout(1500)
        for each in driven.page.evaluate("axe.run().then((found) => found.violations)"):
            places = [node["html"][:120] for node in each["nodes"]]
            found.append(f"{view}, {colour}: {each['impact']}: {each['help']}: {places[:3]}")
    print("".join(f"  {line}\n" for line in found), end="")
    assert not [line for line in found if ": serious: " in line or ": critical: " in line]


def with_a_key(driven: Driven) -> None:
    """A server that wants a key: the page asks for it, and keeps none; a restart of the server is seen."""
    key = "sk-of-the-scene-0123456789"
    with serving("--api-key", key) as (url, _):
        context = driven.page.context.browser.new_context()  # type: ignore[union-attr]
        page = context.new_page()
        page.goto(url)
        page.get_by_label("Key", exact=True).fill("wrong")
        page.get_by_role("button", name="Enter").click()
        expect(page.get_by_role("alert")).to_contain_text("does not know this key")
        page.get_by_label("Key", exact=True).fill(key)
        page.get_by_role("button", name="Enter").click()
        expect(page.locator(".model")).not_to_be_empty(timeout=1000 * SECONDS)
        page.get_by_role("button", name="Pipeline").click()
        expect(page.locator(".stage")).to_have_count(2, timeout=1000 * SECONDS)
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert key not in kept, kept
    expect(page.get_by_text("The server does not answer; what is shown is old.")).to_be_visible(timeout=1000 * SECONDS)
    with serving("--port", url.rpartition(":")[2]) as (again, _):
        assert again == url
        expect(page.get_by_text("what is shown is old")).not_to_be_visible(timeout=1000 * SECONDS)
    context.close()


AXE: str | None = None
SCENES: tuple[Callable[[Driven], None], ...] = (
    first_paint, chat, stop_and_go_on, looks_of_text, hostile_text, library, keyboard, pipeline, widths,
    long_conversation, accessible, with_a_key, lost_worker
)  # fmt: skip


def _open_list(page: Page) -> None:
    menu = page.locator(".menu")
    if menu.is_visible() and menu.get_attribute("aria-expanded") == "false":
        menu.click()


def _import(driven: Driven, messages: list[dict[str, Any]]) -> None:
    _open_list(driven.page)
    with driven.page.expect_file_chooser() as chooser:
        driven.page.get_by_role("button", name="Import").click()
    file = {
        "name": "<img src=x onerror=attacked=1>.json",
        "mimeType": "application/json",
        "buffer": json.dumps(messages).encode(),
    }
    chooser.value.set_files(file)  # type: ignore[arg-type]
    expect(driven.answers()).not_to_have_count(0)


def play(driven: Driven, scene: Callable[[Driven], None]) -> bool:
    """Play one scene on a fresh page; whether all was as it should be."""
    began = time.monotonic()
    driven.complaints.clear()
    driven.page.set_viewport_size({"width": 1280, "height": 800})
    driven.page.goto(driven.url)
    driven.page.reload()
    problem = None
    try:
        expect(driven.page.locator(".model")).not_to_be_empty(timeout=1000 * SECONDS)
        driven.page.keyboard.press("Control+Shift+O")
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
        globals()["AXE"] = options.axe.read_text()
    options.pictures.mkdir(parents=True, exist_ok=True)
    with serving() as (url, server), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        page = browser.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page()
        driven = Driven(page, url, server, options.pictures)
        watched(driven)
        scenes = [scene for scene in SCENES if not options.only or scene.__name__ in options.only]
        failed = sum(not play(driven, scene) for scene in scenes)
        browser.close()
    print(f"{failed} of {len(scenes)} scenes failed; pictures in {options.pictures}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
