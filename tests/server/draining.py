"""SIGTERM under load: every answer ends as its API says, whether it was whole or cut short.

After the signal a new request must be refused with 503 and `Retry-After`, in the form of its API, as long as anybody
listens. What comes to its end must say what the library says, and what is cut short must say so.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asks import Ask, failure_of, has_error_form, text_of_document, text_of_events
from client import Connection, Event, Gone, get, request

_LAST = {"chat": ("[DONE]",), "completions": ("[DONE]",), "messages": ("message_stop", "error")}
_LAST_RESPONSE = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Ended:
    """How an answer ended: "whole", "cut short", "refused", or what was wrong."""

    ask: Ask
    how: str
    wrong: str = ""


async def _ask(port: int, ask: Ask) -> Ended:
    try:
        async with Connection(port) as connection:
            await connection.send(request("POST", ask.path, ask.body))
            answer = await connection.head()
            if answer.status != 200:
                return _refused(ask, answer.status, dict(answer.headers), json.loads(await connection.body(answer)))
            if not ask.streams:
                text = text_of_document(ask.api, json.loads(await connection.body(answer)))
                return Ended(ask, "whole", "" if text == ask.expected else f"said {text!r}, not {ask.expected!r}")
            events = [event async for event in connection.events(answer)]
    except Gone as error:
        return Ended(ask, "lost", f"{error}")
    return _streamed(ask, events)


def _refused(ask: Ask, status: int, headers: dict[str, str], document: object) -> Ended:
    is_right = status == 503 and "retry-after" in headers and has_error_form(ask.path, document)
    return Ended(ask, "refused", "" if is_right else f"{status} {headers} {document}")


def _streamed(ask: Ask, events: list[Event]) -> Ended:
    last = events[-1]
    name = last.data if isinstance(last.data, str) else last.name
    if name not in _LAST.get(ask.api, _LAST_RESPONSE):
        return Ended(ask, "open", f"the last event is {last}")
    text = text_of_events(ask.api, events)
    if failure := failure_of(events):
        known_part = (ask.expected or "")[: len(text)]  # of a long answer only its beginning is known
        is_right = "told to end" in failure and text.startswith(known_part)
        return Ended(ask, "cut short", "" if is_right else f"{failure}: {text!r}")
    return Ended(ask, "whole", "" if text == ask.expected else f"said {text!r}, not {ask.expected!r}")


async def under_load(
    port: int, asks: list[Ask], moment: float, tell: Callable[[], object]
) -> tuple[list[Ended], list[Ended]]:
    """The asks, of whose answers the server is told to end in the middle, and what was asked after it. ``moment``: in
    seconds, since all were under way and one has ended. ``tell``: does it, and returns at once."""
    asking = [asyncio.create_task(_ask(port, ask)) for ask in asks]
    while (await get(port, "/health"))[1]["running"] + sum(task.done() for task in asking) < len(asks):
        await asyncio.sleep(0.01)
    await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(moment)
    tell()
    late = list[Ended]()
    await asyncio.sleep(0.2)
    for ask in asks[:4]:
        try:
            late.append(await _ask(port, ask))
        except OSError:  # nobody listens any more
            break
    return list(await asyncio.gather(*asking)), late


def wrong_with(ended: Sequence[Ended], late: Sequence[Ended]) -> list[str]:
    """What is not as it should be; ``late``: what was asked after the signal."""
    found = [f"{each.ask.kind}: {each.how}: {each.wrong}" for each in (*ended, *late) if each.wrong]
    return found + [f"after the signal {each.ask.kind} was {each.how}" for each in late if each.how != "refused"]
