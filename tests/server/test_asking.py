"""Before an answer begins: whose client leaves, and who is cancelled, while a prompt is tokenized."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect, Request

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.engine.coordinator.requests import RequestOutput
from splitinfer.errors import QueueFull
from splitinfer.llm import LLM
from splitinfer.server.ask import Ask
from splitinfer.server.asking import asked
from splitinfer.server.keys import NOBODY
from splitinfer.server.service import Service
from splitinfer.settings import Settings

ASK = Ask("Once", {}, max_tokens=3)
AT_MOST = 30.0  # seconds, for what takes none


class Tokenizing:
    """A library that tokenizes until it is let go on, beside the event loop, and whose requests only end."""

    fingerprint, max_running, settings = "0", 4, Settings()
    context_length, recommended_sampling, tokenizer = 100, Recommended({}), None

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.aborted, self.is_full = list[str](), False

    def encode(self, _text: str) -> list[int]:
        self.begun.set()
        assert self.go_on.wait(AT_MOST)
        return [5, 6]

    async def asubmit(self, _prompt: list[int], *_: Any, **__: Any) -> Any:
        if self.is_full:
            raise QueueFull("1 requests wait already")
        return SimpleNamespace(abort=lambda: self.aborted.append("aborted"), output=RequestOutput(2))

    def seconds_until_room(self, nth: int) -> float:
        return 7.0 * nth


class Client:
    """One that may leave."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    def request(self) -> Request:
        state = {"request_id": "mine", "route": "/v1/completions", "began": 0.0}
        return Request({"type": "http", "headers": [], "state": state}, self.receive)


def run(main: Callable[[Service, Tokenizing, Client], Any]) -> None:
    async def in_time() -> None:
        llm = Tokenizing()
        try:
            await asyncio.wait_for(main(Service(cast(LLM, llm), "model"), llm, Client()), AT_MOST)
        finally:
            llm.go_on.set()

    asyncio.run(in_time())


def test_whose_client_leaves_is_not_asked():
    async def main(service: Service, llm: Tokenizing, client: Client) -> None:
        with ExitStack() as open_things:
            asking = asyncio.create_task(asked(service, client.request(), NOBODY, [ASK], open_things))
            await asyncio.to_thread(llm.begun.wait, AT_MOST)
            client.leaves.set()
            with pytest.raises(ClientDisconnect):
                await asking
        assert (service.num_running, service.cancel("mine", NOBODY)) == (0, False)

    run(main)


def test_who_is_cancelled_while_it_is_tokenized_ends_as_it_begins():
    async def main(service: Service, llm: Tokenizing, client: Client) -> None:
        with ExitStack() as open_things:
            asking = asyncio.create_task(asked(service, client.request(), NOBODY, [ASK], open_things))
            await asyncio.to_thread(llm.begun.wait, AT_MOST)
            assert service.cancel("mine", NOBODY)
            llm.go_on.set()
            answer = await asking
            assert (answer.is_cancelled, llm.aborted) == (True, ["aborted"])

    run(main)
