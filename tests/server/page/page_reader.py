"""A page that reads a server's figures as they come, without sockets."""

import asyncio
import json
from typing import Any

from asgi import scope_of
from mutating import Asked

from splitinfer.server.guard import Guard
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

KEY = ("X-Api-Key", "secret")
FIGURES = "/v1/splitinfer/figures"
SECONDS = 60.0  # more than anything here takes


class Reader:
    """A page that reads the figures as they come."""

    def __init__(self, service: Service, application: Guard | None = None) -> None:
        self._lines, self._gone = asyncio.Queue[bytes](), asyncio.Event()
        asked = Asked("GET", FIGURES, (KEY, ("Accept", "text/event-stream")), b"")
        self.task = asyncio.create_task((application or make_app(service))(scope_of(asked), self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message.get("body"):
            self._lines.put_nowait(message["body"])

    async def next(self, name: str) -> Any:
        async with asyncio.timeout(SECONDS):
            while True:
                head, _, data = (await self._lines.get()).decode().partition("\n")
                if head == f"event: {name}":
                    return json.loads(data.strip().removeprefix("data: "))

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.task, SECONDS)
