"""What drives the server's page in a real browser: servers, pages, and what must never be seen on one."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

from .serving import LOCAL, Serving, serving

WIDTHS = {"phone": (390, 844), "tablet": (834, 1112), "wide": (1440, 900)}
SECONDS = 60.0
PATIENCE = 1000 * SECONDS  # milliseconds


@dataclass
class Driven:
    """A browser's page, the server behind it, and what was seen that must not be."""

    page: Page
    server: Serving
    pictures: Path
    complaints: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    def picture(self, name: str) -> None:
        self.page.screenshot(path=str(self.pictures / f"{name}.png"))

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.get_by_role("button", name="Send").click()

    def set(self, **values: str) -> None:
        self.press_settings()
        for name, value in values.items():
            self.page.locator(f'input[name="{name}"]').fill(value)
        for name, value in values.items():
            expect(self.page.locator(f'input[name="{name}"]')).to_have_value(value)
        self.press_settings()

    def press_settings(self) -> None:
        """Open or close their panel."""
        self.page.get_by_role("button", name="Settings").click()

    def show(self, view: str) -> None:
        self.page.get_by_role("button", name=view, exact=True).click()

    def until_idle(self) -> None:
        expect(self.page.get_by_role("button", name="Send")).to_be_visible(timeout=PATIENCE)

    def answers(self) -> Locator:
        return self.page.locator("article.assistant")

    def text(self) -> str:
        """The last answer as it is, by the button that copies it."""
        self.answers().last.get_by_role("button", name="Copy", exact=True).click()
        copied: str = self.page.evaluate("navigator.clipboard.readText()")
        return copied

    def ready(self) -> None:
        """The model is known, and a conversation begins."""
        expect(self.page.locator(".model")).not_to_be_empty(timeout=PATIENCE)
        self.page.keyboard.press("Control+Shift+O")

    @contextlib.contextmanager
    def another(self, server: Serving | None = None) -> Iterator["Driven"]:
        """A page of somebody else, at this server or another."""
        browser = self.page.context.browser
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        other = Driven(context.new_page(), server or self.server, self.pictures, self.complaints)
        watched(other)
        try:
            other.page.goto(other.url)
            yield other
        except BaseException:
            other.picture("failed-another")
            raise
        finally:
            context.close()

    def open_list(self) -> None:
        menu = self.page.locator(".menu")
        if menu.is_visible() and menu.get_attribute("aria-expanded") == "false":
            menu.click()

    def read_in(self, messages: list[dict[str, Any]]) -> None:
        self.open_list()
        with self.page.expect_file_chooser() as chooser:
            self.page.get_by_role("button", name="Import").click()
        file = {
            "name": "<img src=x onerror=attacked=1>.json",
            "mimeType": "application/json",
            "buffer": json.dumps(messages).encode(),
        }
        chooser.value.set_files(file)  # type: ignore[arg-type]
        expect(self.answers()).not_to_have_count(0)


@contextlib.contextmanager
def demo(*args: str, workers: Sequence[str] = (LOCAL,)) -> Iterator[Serving]:
    with serving("--draft", "demo-draft", *args, workers=workers, model="demo", layers=12) as server:
        yield server


def watched(driven: Driven) -> None:
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
    return "ERR_CONNECTION_REFUSED" not in text and "status of 40" not in text and "ERR_INCOMPLETE" not in text
