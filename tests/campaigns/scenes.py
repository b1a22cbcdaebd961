"""Scenes of the chat: looks, attacks, a library of conversations, keyboard."""

import json
from pathlib import Path

from playwright.sync_api import expect

from .driving import PATIENCE, Driven

ATTACKS = Path(__file__).parents[1] / "page" / "attacks.json"
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


def chat(driven: Driven) -> None:
    """Ask, read, retry, edit, branch."""
    page = driven.page
    driven.set(max_tokens="60")
    driven.ask("Tell me of the wolf.")
    driven.until_idle()
    expect(driven.answers()).to_have_count(1)
    figures = driven.answers().locator(".figures").inner_text()
    assert "tokens/s" in figures, figures
    assert "to first token" in figures, figures
    driven.picture("chat-answer")
    driven.answers().get_by_role("button", name="Retry").click()
    driven.until_idle()
    expect(driven.answers().locator(".branches")).to_contain_text("2 / 2")
    page.get_by_label("Previous branch").click()
    expect(driven.answers().locator(".branches")).to_contain_text("1 / 2")
    page.locator("article.user").hover()
    page.locator("article.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edited text").fill("Tell me of the fox.")
    page.get_by_role("button", name="Send as a branch").click()
    driven.until_idle()
    expect(page.locator("article.user .branches")).to_contain_text("2 / 2")
    expect(page.locator("article.user")).to_contain_text("fox")
    page.locator("article.user").get_by_label("Previous branch").click()
    expect(page.locator("article.user")).to_contain_text("wolf")


def settings_while_an_answer_comes(driven: Driven) -> None:
    """What is typed in the settings stays, however often the page is drawn meanwhile."""
    page = driven.page
    driven.set(max_tokens="600")
    driven.ask("Tell me of the wolf.")
    expect(driven.answers().locator(".markdown")).not_to_be_empty(timeout=PATIENCE)
    driven.press_settings()
    page.get_by_label("System message").press_sequentially("Be brief.", delay=50)
    page.locator('input[name="temperature"]').press_sequentially("0.35", delay=50)
    expect(page.get_by_label("System message")).to_have_value("Be brief.")
    expect(page.locator('input[name="temperature"]')).to_have_value("0.35")
    expect(page.get_by_role("button", name="Settings (3)")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    driven.until_idle()


def stop_and_continue(driven: Driven) -> None:
    """An answer that ended at the token limit continues where it was."""
    page = driven.page
    driven.press_settings()
    page.locator('input[name="max_tokens"]').fill("8")
    page.locator('input[name="temperature"]').fill("0")
    page.locator('input[name="probabilities"]').check()
    driven.press_settings()
    driven.ask("Once upon a time")
    driven.until_idle()
    expect(driven.answers()).to_contain_text("Stopped at the token limit.")
    page.locator(".probabilities summary").click()
    page.locator(".token").first.click()
    expect(page.get_by_label("Most likely tokens here").locator("tr")).to_have_count(5)
    before = driven.answers().locator(".markdown").inner_text()
    page.get_by_role("button", name="Continue").click()
    expect(driven.answers().locator(".markdown")).not_to_have_text(before)
    driven.until_idle()
    after = driven.answers().locator(".markdown").inner_text()
    assert after.startswith(before.strip()), (before, after)
    assert len(after) > len(before), (before, after)


def looks_of_text(driven: Driven) -> None:
    """Markdown, code with its button, a table, formulas."""
    driven.read_in([{"role": "user", "content": "Show me."}, {"role": "assistant", "content": MARKDOWN}])
    page = driven.page
    expect(page.locator("math")).to_have_count(2, timeout=PATIENCE)
    expect(page.locator(".code-bar")).to_contain_text("python")
    expect(page.locator("article.assistant a")).to_have_attribute("rel", "noopener noreferrer nofollow")
    page.get_by_role("button", name="Copy this python").click()


def hostile_text(driven: Driven) -> None:
    """Attacks in an answer, in a user's message, a title and a file's name do nothing."""
    attacks = json.loads(ATTACKS.read_text())
    pairs = [[{"role": "user"}, {"role": "assistant", "reasoning_content": attack}] for attack in attacks]
    messages = [{**one, "content": attack} for attack, pair in zip(attacks, pairs, strict=True) for one in pair]
    driven.read_in(messages)
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
    driven.read_in([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Of zebras?"},
                     {"role": "assistant", "content": "Striped.", "token_ids": [1, 2]}])  # fmt: skip
    page.reload()
    driven.open_list()
    page.get_by_label("Search conversations").fill("zebras striped")
    expect(page.locator(".sidebar li")).to_have_count(1)
    page.locator(".sidebar .title").click()
    expect(driven.answers()).to_contain_text("Striped.")
    driven.open_list()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    saved = json.loads(Path(download.value.path()).read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"], saved
    page.locator(".sidebar li").hover()
    page.get_by_label("Remove Of zebras?").click()
    expect(page.locator(".sidebar li")).to_have_count(0)


def keyboard(driven: Driven) -> None:
    page = driven.page
    page.keyboard.press("Control+Shift+O")
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another.")
    page.keyboard.press("Enter")
    expect(driven.answers()).to_have_count(1, timeout=PATIENCE)
    page.keyboard.press("Escape")
    driven.until_idle()
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.keyboard.press("Escape")


SCENES = (chat, settings_while_an_answer_comes, stop_and_continue, looks_of_text, hostile_text, library, keyboard)
