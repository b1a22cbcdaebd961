"""Before an answer begins: a client that leaves, and one that is cancelled, while its prompt is tokenized."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

from asgi import SECONDS, Client, answer, posted
from stub_model import Model
from valid_requests import Asked

from splitinfer.engine.coordinator.requests import RequestOutput, StreamEvent
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
        return SimpleNamespace(
            prompt=(5, 6), prompt_logprobs=None, submitted=0.0, output=output, batches=batches, abort=abort
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
