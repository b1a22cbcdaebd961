"""A page that reads a server's figures as they come, without sockets."""

import asyncio
import json
from typing import Any

from asgi import SECONDS, Client
from valid_requests import Asked

from splitinfer.server.guard import Guard
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

KEY = ("X-Api-Key", "secret")
FIGURES = "/v1/splitinfer/figures"


class Reader(Client):
    """Of an application of its own if none is given."""

    def __init__(self, service: Service, application: Guard | None = None) -> None:
        super().__init__(
            application or make_app(service), Asked("GET", FIGURES, (KEY, ("Accept", "text/event-stream")))
        )

    async def next(self, name: str) -> Any:
        async with asyncio.timeout(SECONDS):
            while True:
                head, _, data = (await self.part()).decode().partition("\n")
                if head == f"event: {name}":
                    return json.loads(data.strip().removeprefix("data: "))
