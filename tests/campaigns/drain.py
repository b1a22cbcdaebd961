"""SIGTERM under load: every answer ends as its API says, whether it was whole or cut short, and the process goes.

    python -m tests.campaigns.drain --streams 60 --drain-seconds 3

Real processes, two stages. Streams and documents of all APIs are under way, short ones that end in time and long ones
that do not, and more wait in the queue. After the signal a new request must be refused with 503 and `Retry-After`, in
the form of its API, as long as anybody listens. What comes to its end must say what the library says, what is cut short
must say so, and the exit code is 143.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .asks import Ask, canaries, failure_of, has_error_form, known, streams_of, text_of_document, text_of_events
from .client import Connection, Event, Gone, get, request
from .serving import END_SECONDS, are_gone, library, serving, told, until

_LONG = 3000  # tokens, which nobody waits for
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


def run(num_streams: int, drain_seconds: float, seed: int) -> int:
    """The campaign; the number of troubles."""
    with library() as llm:
        short = known(llm, [replace(each, num_tokens=10) for each in canaries(6)])
        long = [
            replace(each, num_tokens=_LONG) for each in known(llm, [replace(c, num_tokens=300) for c in canaries(3)])
        ]
    chance = random.Random(seed)
    all_asks = [ask for canary in (*short, *long) for ask in streams_of(canary)]
    asks = [_as_drawn(chance.choice(all_asks), chance) for _ in range(num_streams)]
    troubles = list[str]()
    with serving("--max-running", "8", "--drain-seconds", str(drain_seconds)) as server:
        workers = server.workers
        moment = random.Random(seed).uniform(0.3, 1.0)
        ended, late = asyncio.run(under_load(server.port, asks, moment, lambda: server.running.signal(signal.SIGTERM)))
        began = time.monotonic()
        code = server.running.wait(END_SECONDS)
        until(lambda: are_gone(workers), "its workers are gone", 10.0)
        troubles += [] if code == 143 else [f"it ended with {code}"]
        troubles += server.complaints
    troubles += wrong_with(ended, late)
    counts = Counter((each.ask.kind, each.how) for each in ended)
    for (kind, how), count in sorted(counts.items()):
        print(f"{kind:<24}{how:<12}{count}")
    gone_after = time.monotonic() - began
    print(f"{len(late)} more were refused; it was gone {gone_after:.1f} s after the last answer, code {code}")
    return told(troubles)


def wrong_with(ended: Sequence[Ended], late: Sequence[Ended]) -> list[str]:
    """What is not as it should be; ``late``: what was asked after the signal."""
    found = [f"{each.ask.kind}: {each.how}: {each.wrong}" for each in (*ended, *late) if each.wrong]
    return found + [f"after the signal {each.ask.kind} was {each.how}" for each in late if each.how != "refused"]


def _as_drawn(ask: Ask, chance: random.Random) -> Ask:
    """Every third as a document."""
    if chance.random() < 2 / 3:
        return ask
    body = {name: value for name, value in ask.body.items() if name != "stream"}
    return replace(ask, kind=ask.kind.removesuffix(", stream"), body=body, streams=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--drain-seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(1 if run(args.streams, args.drain_seconds, args.seed) else 0)


if __name__ == "__main__":
    main()
