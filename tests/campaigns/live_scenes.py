"""Scenes of the pipeline, and of what happens to it: others' dials, hidden tabs, lost workers, a server's restart."""

from contextlib import closing

import httpx2 as httpx
from playwright.sync_api import Page, expect
from processes import until

from .driving import PATIENCE, WIDTHS, Driven, demo
from .serving import RestartedWorker


def pipeline(driven: Driven) -> None:
    """The pipeline while it works, and what it says."""
    page = driven.page
    driven.set(max_tokens="1500")
    driven.ask("Tell me a long tale of the wolf, the fox and the bear.")
    page.get_by_role("button", name="Pipeline").click()
    expect(page.locator(".stage")).to_have_count(2, timeout=PATIENCE)
    expect(page.locator(".words li")).not_to_have_count(0)
    width, height = WIDTHS["wide"]
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_timeout(1500)
    driven.picture("pipeline-wide")
    label = page.locator(".timeline canvas").get_attribute("aria-label")
    assert "a: " in (label or ""), label
    page.get_by_role("button", name="Chat").click()


def with_a_key(driven: Driven) -> None:
    """A server that wants a key: the page asks for it, and keeps none."""
    key = "sk-of-the-scene-0123456789"
    with demo("--api-key", key) as server:
        context = driven.page.context.browser.new_context()  # type: ignore[union-attr]
        page = context.new_page()
        page.goto(server.url)
        page.get_by_label("Key", exact=True).fill("wrong")
        page.get_by_role("button", name="Enter").click()
        expect(page.get_by_role("alert")).to_contain_text("This key is not valid.")
        page.get_by_label("Key", exact=True).fill(key)
        page.get_by_role("button", name="Enter").click()
        expect(page.locator(".model")).not_to_be_empty(timeout=PATIENCE)
        page.get_by_role("button", name="Pipeline").click()
        expect(page.locator(".stage")).to_have_count(2, timeout=PATIENCE)
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert key not in kept, kept
    context.close()


def dials(driven: Driven) -> None:
    """A dial is turned, and seen by another page; what cannot be is said; all go back to their defaults."""
    page = driven.page
    driven.show("Pipeline")
    with driven.another() as other:
        other.show("Pipeline")
        for each in (page, other.page):
            each.locator(".dials summary").click(timeout=PATIENCE)
        page.get_by_label("prefill_share").fill("0.25")
        page.get_by_label("policy").select_option("prefill_first")
        page.get_by_role("button", name="Apply").click()
        expect(page.locator(".dials summary")).to_have_text("Dials of serving · 2 set", timeout=PATIENCE)
        expect(other.page.get_by_label("prefill_share")).to_have_value("0.25", timeout=PATIENCE)
        page.get_by_label("kv_low").fill("0.95")
        page.get_by_role("button", name="Apply").click()
        expect(page.locator(".dials .error")).to_contain_text("kv_low and kv_high must be", timeout=PATIENCE)
        for name, (width, height) in WIDTHS.items():
            page.set_viewport_size({"width": width, "height": height})
            page.locator(".dials .buttons").scroll_into_view_if_needed()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        page.get_by_role("button", name="Reset to defaults").click()
        page.get_by_role("button", name="Apply").click()
        expect(page.locator(".dials summary")).to_have_text("Dials of serving", timeout=PATIENCE)
        expect(other.page.get_by_label("prefill_share")).to_have_value("", timeout=PATIENCE)
    driven.show("Chat")


def hidden_tab(driven: Driven) -> None:
    """A tab that nobody sees asks for no figures, by the server's own count; and it comes back by itself."""
    with demo() as server, driven.another(server) as looking:
        page = looking.page
        looking.show("Pipeline")
        expect(page.locator(".stage")).to_have_count(2, timeout=PATIENCE)
        until(lambda: _looking(server.url) == 1, "its stream is counted")
        _hide(page, is_hidden=True)
        until(lambda: _looking(server.url) == 0, "no stream is open")
        page.wait_for_timeout(3000)
        assert _looking(server.url) == 0
        _hide(page, is_hidden=False)
        until(lambda: _looking(server.url) == 1, "it is back")
        looking.show("Chat")
        until(lambda: _looking(server.url) == 0, "in a chat where nothing comes, nobody looks")


QUESTIONS = ("Tell me of the wolf.", "What did the king say?")


def two_chats_lose_a_worker(driven: Driven) -> None:
    """Under two answers the worker is killed: both say what they wait for, and go on; no token is lost."""
    with (
        closing(RestartedWorker("--kv-dir", "none")) as worker,
        demo("--rejoin-timeout", "300", workers=[worker.address]) as server,
        driven.another(server) as one,
        driven.another(server) as two,
    ):
        chats = dict(zip(QUESTIONS, (one, two), strict=True))
        for question, each in chats.items():
            each.ready()
            each.set(max_tokens="700", temperature="0")
            each.ask(question)
        for each in (one, two):
            expect(each.answers().locator(".markdown")).not_to_be_empty(timeout=PATIENCE)
        worker.kill()
        for each in (one, two):
            expect(each.page.locator(".pause")).to_contain_text("stage b", timeout=PATIENCE)
        one.show("Pipeline")
        expect(one.page.locator(".stage.lost")).to_contain_text("b", timeout=PATIENCE)
        expect(one.page.locator(".words")).to_contain_text("no token is lost")
        one.show("Chat")
        worker.start_again()
        for question, each in chats.items():
            expect(each.page.locator(".pause")).not_to_be_visible(timeout=PATIENCE)
            each.until_idle()
            each.page.bring_to_front()
            given, whole = each.text(), _said(server.url, question, 700)
            assert given == whole, f"it goes on as if nothing had happened: {given!r} is not {whole!r}"


def restart(driven: Driven) -> None:
    """The server is killed under an answer and started again: the answer says so, figures come back, and it goes on."""
    with demo() as server, driven.another(server) as one:
        one.ready()
        one.set(max_tokens="2000", temperature="0")
        one.ask("Tell me of the wolf.")
        expect(one.answers().locator(".markdown")).not_to_be_empty(timeout=PATIENCE)
        server.running.end()
        expect(one.answers()).to_contain_text("The connection to the server was lost.", timeout=PATIENCE)
        one.show("Pipeline")
        old = one.page.get_by_text("The server does not answer; these figures are old.")
        expect(old).to_be_visible(timeout=PATIENCE)
        with demo("--port", str(server.port)):
            expect(old).not_to_be_visible(timeout=PATIENCE)
            one.show("Chat")
            before = one.text()
            one.page.get_by_role("button", name="Continue").click()
            one.page.wait_for_timeout(1000)
            one.page.keyboard.press("Escape")
            one.until_idle()
            assert one.text().startswith(before)
            assert len(one.text()) > len(before)


def _looking(url: str) -> int:
    return int(httpx.get(f"{url}/v1/splitinfer/figures", timeout=60).json()["looking"])


def _said(url: str, question: str, max_tokens: int) -> str:
    """What the server says to it, undisturbed."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
    said = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
    return str(said["choices"][0]["message"]["content"])


def _hide(page: Page, *, is_hidden: bool) -> None:
    """What a browser tells a page whose tab is hidden. A headless one has no tabs that could hide each other."""
    page.evaluate(
        """(isHidden) => {
            Object.defineProperty(document, 'hidden', { configurable: true, get: () => isHidden });
            Object.defineProperty(document, 'visibilityState',
                { configurable: true, get: () => (isHidden ? 'hidden' : 'visible') });
            document.dispatchEvent(new Event('visibilitychange'));
        }""",
        is_hidden,
    )


SCENES = (pipeline, dials, with_a_key, hidden_tab, two_chats_lose_a_worker, restart)
