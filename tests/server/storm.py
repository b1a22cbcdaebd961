"""Requests of every kind, whose clients read, dawdle, go in the middle, or have them cancelled.

A client asks one thing after the other, mostly on one connection, and what becomes of each request is drawn with it:

    reads         all of the answer, as fast as it comes
    dawdles       reads nothing for a while, then a byte at a time for a while, then the rest
    goes queued   as soon as the request is sent
    goes prefill  a moment later
    goes decode   after some of the answer
    goes sending  in the middle of the request
    goes between  when the answer is there, on a connection that could be used again
    cancelled     by its id, on another connection

Every answer that is read to its end is compared with what the library said beforehand, and every refusal has the form
of its API.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asks import KINDS, Ask, Canary, complaint, has_error_form, text_of_document, text_of_events
from client import Answer, Connection, Event, Gone, request

from splitinfer.core.json_text import dumps

GOES = ("goes queued", "goes prefill", "goes decode", "goes sending")
FATES = (("reads", 10), ("dawdles", 1), *((fate, 1) for fate in GOES), ("goes between", 1), ("cancelled", 1))
_AGAIN_SECONDS = 1.0  # until a request is made again that was turned away; a client would wait longer
_MOST_AGAIN = 30


@dataclass
class Weather:
    """What became of the requests."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # of kind, fate and what came
    troubles: list[str] = field(default_factory=list)
    num_compared: int = 0

    def count(self, ask: Ask, fate: str, what: str) -> None:
        self.counts[ask.kind, fate, what] += 1

    def compare(self, ask: Ask, text: str) -> None:
        """An answer that was read to its end."""
        if ask.expected:
            self.num_compared += 1
            if text != ask.expected:
                self.troubles.append(f"{ask.kind} said {text!r}, not {ask.expected!r}; asked with {ask.body}")


# -- one request -----------------------------------------------------------------------------------


@dataclass
class Client:
    """Asks one thing after the other. ``connection``: kept from the last one, if it can be used again."""

    port: int
    chance: random.Random
    weather: Weather
    connection: Connection | None = None

    async def ask(self, ask: Ask, fate: str, name: str) -> None:
        """One request, and its fate."""
        is_slow = fate == "dawdles"
        if self.connection is None or is_slow:
            self.leave()
            self.connection = await Connection(self.port, is_slow=is_slow).__aenter__()
        sent = request(ask.method, ask.path, ask.body, {"X-Request-Id": name})
        try:
            await self._carry_out(ask, fate, name, sent)
        except Gone as error:
            self.leave()
            self.weather.count(ask, fate, "lost")
            self.weather.troubles.append(f"{ask.kind}, {fate}: {error}")
        if is_slow or fate == "goes between":
            self.leave()

    def leave(self) -> None:
        """Go, one way or the other."""
        if self.connection is not None:
            self.connection.close() if self.chance.random() < 0.5 else self.connection.reset()
            self.connection = None

    async def _carry_out(self, ask: Ask, fate: str, name: str, sent: bytes) -> None:
        assert self.connection is not None
        if fate == "goes sending":
            await self.connection.send(sent[: self.chance.randrange(1, len(sent))])
            return self._gone(ask, fate)
        for _ in range(_MOST_AGAIN):
            await self.connection.send(sent)
            if fate in ("goes queued", "goes prefill"):
                await asyncio.sleep(0 if fate == "goes queued" else self.chance.uniform(0, 0.2))
                return self._gone(ask, fate)
            if fate == "cancelled" and not ask.streams:
                await asyncio.sleep(self.chance.uniform(0, 0.1))
                await _cancel(self.port, name)
            if fate == "dawdles":
                await self._dawdle()
            answer = await self.connection.head()
            if answer.status != 429:
                break
            self._turned_away(ask, answer, await self.connection.body(answer))
            await asyncio.sleep(self.chance.uniform(0, _AGAIN_SECONDS))
        if ask.streams and answer.status == 200:
            return await self._read_stream(ask, fate, name, answer)
        return self._take(ask, fate, answer, json.loads(await self.connection.body(answer)))

    def _gone(self, ask: Ask, fate: str) -> None:
        self.leave()
        self.weather.count(ask, fate, "gone")

    def _turned_away(self, ask: Ask, answer: Answer, body: bytes) -> None:
        self.weather.count(ask, "turned away", "429")
        if not (1 <= int(answer.headers.get("retry-after", 0)) <= 60 and has_error_form(ask.path, json.loads(body))):
            self.weather.troubles.append(f"{ask.kind} is turned away with {answer.headers} {body!r}")

    async def _dawdle(self) -> None:
        assert self.connection is not None
        await asyncio.sleep(self.chance.uniform(0.2, 3.0))
        for _ in range(self.chance.randrange(200)):
            await self.connection.read(1)
            await asyncio.sleep(0.001)

    async def _read_stream(self, ask: Ask, fate: str, name: str, answer: Answer) -> None:
        assert self.connection is not None
        events: list[Event] = []
        at = self.chance.randrange(1, 12) if fate in ("goes decode", "cancelled") else 0
        async for event in self.connection.events(answer):
            events.append(event)
            if len(events) == at and fate == "goes decode":
                return self._gone(ask, fate)
            if len(events) == at and fate == "cancelled":
                await _cancel(self.port, name)
        if wrong := complaint(ask, events):
            self.weather.troubles.append(f"{ask.kind}, {fate}: {wrong}")
        self._finished(ask, fate, "whole", text_of_events(ask.api, events))
        return None

    def _take(self, ask: Ask, fate: str, answer: Answer, document: Any) -> None:
        """A document."""
        if answer.status != ask.status:
            self.weather.troubles.append(f"{ask.kind}, {fate}: {answer.status} {dumps(document)[:300]}")
        if answer.status == 200:
            text = text_of_document(ask.api, document) if ask.is_answered else ""
            return self._finished(ask, fate, "200", text)
        if not has_error_form(ask.path, document):
            self.weather.troubles.append(f"{ask.kind} is refused with {dumps(document)[:300]}")
        return self.weather.count(ask, fate, f"{answer.status}")

    def _finished(self, ask: Ask, fate: str, what: str, text: str) -> None:
        if fate == "cancelled" and ask.expected:  # somewhere in the middle, or just behind the end
            is_begun = ask.may_say(text)
            self.weather.count(ask, fate, "whole" if text == ask.expected else "cut" if is_begun else "other")
            if not is_begun:
                self.weather.troubles.append(f"{ask.kind}, {fate}: said {text!r} of {ask.expected!r}")
            return
        self.weather.count(ask, fate, what)
        self.weather.compare(ask, text)


async def _cancel(port: int, name: str) -> None:
    async with Connection(port) as connection:
        await connection.send(request("DELETE", f"/v1/requests/{name}"))
        answer = await connection.head()
        await connection.body(answer)
        assert answer.status in (200, 404), answer


# -- the storm -------------------------------------------------------------------------------------


def draw(number: int, seed: int, known_canaries: Sequence[Canary]) -> tuple[Ask, str]:
    """The request of a number, and its fate."""
    chance = random.Random(f"{seed} {number}")
    make = chance.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    ask = make(chance.choice(known_canaries), chance)
    fate = chance.choices([fate for fate, _ in FATES], [weight for _, weight in FATES])[0]
    if fate in ("goes decode", "cancelled", "dawdles") and not ask.is_answered:
        fate = "reads"
    return ask, "goes prefill" if fate == "goes decode" and not ask.streams else fate


async def storm(
    port: int, numbers: Sequence[int], seed: int, known_canaries: Sequence[Canary], num_clients: int, weather: Weather
) -> None:
    """The requests of ``numbers``, by so many clients at a time."""
    left = iter(numbers)

    async def client(which: int) -> None:
        own = Client(port, random.Random(f"{seed} client {which}"), weather)
        for number in left:
            ask, fate = draw(number, seed, known_canaries)
            await own.ask(ask, fate, f"storm-{seed}-{number}")
        own.leave()

    await asyncio.gather(*(client(which) for which in range(num_clients)))
