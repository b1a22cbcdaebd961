"""Before an answer begins: a client that leaves, and one that is cancelled, while its prompt is tokenized; and others,
while long prompts are."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from asgi import SECONDS, Client, answer, posted
from stub_model import Model
from valid_requests import Asked

from splitinfer.engine.loop.requests import RequestOutput, StreamEvent
from splitinfer.server import body
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

ASKED = posted("/v1/completions", {"prompt": "Once"}, ("X-Request-Id", "mine"))
CANCEL = Asked("DELETE", "/v1/requests/mine")


class Tokenizing(Model):
    """Tokenizes until it is let go on, beside the event loop. Its requests end when they are aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on, self.num_aborts = threading.Event(), threading.Event(), 0

    def encode(self, _text: str, **_: Any) -> list[int]:
        self.begun.set()
        assert self.go_on.wait(SECONDS)
        return [5, 6]

    async def asubmit(self, _prompt: Any, *_: Any, **__: Any) -> Any:
        async def batches() -> AsyncGenerator[list[StreamEvent], None]:
            yield [StreamEvent((), "", 0.0, "abort" if self.num_aborts else "stop")]

        def abort() -> None:
            self.num_aborts += 1

        output = RequestOutput(2)
        ends = frozenset[int]()
        return SimpleNamespace(
            prompt=(5, 6), submitted=0.0, output=output, batches=batches, abort=abort, end_tokens=ends
        )


def run(main: Callable[[Service, Tokenizing, Client], Any]) -> None:
    async def in_time() -> None:
        model = Tokenizing()
        service = Service(model, "demo")  # type: ignore[arg-type]
        client = Client(make_app(service), ASKED)
        await asyncio.to_thread(model.begun.wait, SECONDS)
        try:
            await main(service, model, client)
        finally:
            model.go_on.set()

    asyncio.run(asyncio.wait_for(in_time(), SECONDS))


def test_who_leaves_is_not_asked_for():
    async def main(service: Service, _model: Tokenizing, client: Client) -> None:
        await client.leave()
        assert service.num_running == 0
        assert (await answer(make_app(service), CANCEL)).status == 404

    run(main)


def test_who_is_cancelled_ends_as_it_begins():
    async def main(service: Service, model: Tokenizing, client: Client) -> None:
        assert (await answer(make_app(service), CANCEL)).json == {"cancelled": True}
        model.go_on.set()
        said = await client.whole()
        assert (said.status, said.json["choices"][0]["finish_reason"]) == (200, "length")
        assert model.num_aborts > 0

    run(main)


class Slow(Model):
    """Tokenizes a prompt that begins with a number when it is let go on; ``begun``: their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = list[int](), threading.Semaphore(0)

    def encode(self, text: str, **_: Any) -> list[int]:
        number, is_slow, _rest = text.partition(":")
        if is_slow:
            self.begun.append(int(number))
            assert self.go_on.acquire(timeout=SECONDS)
        return [5, 6]


def long_prompt(number: int) -> Asked:
    return posted("/v1/completions", {"prompt": f"{number}:" + "x" * 300_000})


def prompt_with_picture(number: int) -> Asked:
    picture = {"type": "image_url", "image_url": "data:image/png;base64,AA=="}
    content = [{"type": "text", "text": f"{number}:"}, picture]
    return posted("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize("slow", [long_prompt, prompt_with_picture])
def test_prompts_that_take_long_have_turns_and_hold_nobody_else_up(
    slow: Callable[[int], Asked], monkeypatch: pytest.MonkeyPatch
):
    """Threads are few: what else is done beside the event loop, such as metrics and grammars, always finds one."""
    monkeypatch.setattr(body, "_SOON_PARSED", 1 << 20)  # where threads parse, who came first is not read first
    model = Slow()

    async def main() -> None:
        application = make_app(Service(model, "demo"))  # type: ignore[arg-type]
        clients = [Client(application, slow(number)) for number in range(20)]
        while not model.begun:
            await asyncio.sleep(0)
        for asked in (ASKED, posted("/tokenize", {"prompt": "Once"})):
            assert (await answer(application, asked)).status in (200, 429)
        await asyncio.to_thread(lambda: None)
        await clients[10].leave()  # while it waits
        for number in range(20, 40):  # who comes as a turn ends waits behind all that wait
            model.go_on.release()
            await asyncio.sleep(0.001)
            clients.append(Client(application, slow(number)))
        for _ in clients:
            model.go_on.release()
        await asyncio.gather(*(client.task for client in clients))
        numbers = [number for number in range(40) if number != 10]
        assert all(abs(found - number) <= 2 for found, number in zip(model.begun, numbers, strict=True)), model.begun

    try:
        asyncio.run(asyncio.wait_for(main(), SECONDS / 4))
    finally:
        model.go_on.release(40)
