"""A thousand open streams, of which a few decode at a time.

    python -m tests.campaigns.open_streams --streams 1000 --max-running 64

Real processes, two stages. The streams are opened one after the other, and the first ones have long answers, so that
all are open at once; the server answers so many at a time. Each must get its first token in the order of its arrival,
as far as those that run together let it, none may be silent for ten seconds, and each text must be what the library
says. Printed: how far a first token came out of order, the longest silence, the memory of all processes, and how long
`/health` took meanwhile.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from splitinfer.core.json_text import dumps

from .asks import Ask, Canary, asks_of, canaries, complaint, known, streamed, text_of_events
from .client import Connection, Event, get, request
from .serving import Held, left_by, library, megabytes, percentile, serving, settle, told

SILENT = 10.0  # seconds
_HEALTH_EVERY = 0.05


@dataclass
class Crowd:
    """What was seen. ``firsts``: the streams' numbers in the order of their first tokens."""

    firsts: list[int] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    to_first: list[float] = field(default_factory=list)  # seconds
    num_pings: int = 0
    health_seconds: list[float] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    opened_in: float = 0.0  # seconds
    open_at_once: int = 0
    while_open: Held | None = None
    is_over: bool = False

    @property
    def most_out_of_order(self) -> int:
        """By how many places a first token came later than it was asked for."""
        return max((place - number for place, number in enumerate(self.firsts)), default=0)

    def check(self, max_running: int) -> None:
        """Nobody was starved."""
        if max(self.silences) > SILENT:
            self.troubles.append(f"a stream was silent for {max(self.silences):.1f} s")
        if self.most_out_of_order > 2 * max_running:
            self.troubles.append(f"a first token came {self.most_out_of_order} places too late")


async def _read(ask: Ask, number: int, connection: Connection, crowd: Crowd) -> None:
    """A stream to its end, whose head was read."""
    began, events, is_first = asyncio.get_running_loop().time(), list[Event](), True
    answer = await connection.head()
    if answer.status != 200:
        crowd.troubles.append(f"stream {number} got {answer.status}")
        return
    async for event in connection.events(answer):
        events.append(event)
        crowd.num_pings += event.data is None
        if is_first and text_of_events(ask.api, [event]):
            crowd.firsts.append(number)
            crowd.to_first.append(event.at - began)
            is_first = False
    connection.close()
    crowd.silences.append(connection.silence)
    text = text_of_events(ask.api, events)
    if wrong := complaint(ask, events):
        crowd.troubles.append(f"stream {number}: {wrong}")
    elif text != ask.expected:
        crowd.troubles.append(f"stream {number} said {text!r}, not {ask.expected!r}")


async def _watch_health(port: int, crowd: Crowd) -> None:
    loop = asyncio.get_running_loop()
    while not crowd.is_over:
        began = loop.time()
        status, _ = await get(port, "/health")
        crowd.health_seconds.append(loop.time() - began)
        if status != 200:
            crowd.troubles.append(f"/health says {status}")
        await asyncio.sleep(_HEALTH_EVERY)


async def open_all(port: int, asks: list[Ask], crowd: Crowd, held: Callable[[], Held | None] = lambda: None) -> None:
    """Open the streams one after the other, and read them all. ``held``: looks at what processes hold."""
    began = time.monotonic()
    watching = asyncio.create_task(_watch_health(port, crowd))
    reading = []
    for number, ask in enumerate(asks):
        connection = await Connection(port).__aenter__()
        await connection.send(request("POST", ask.path, ask.body))
        await connection.read()  # its head: the engine has it now, and not later than the next
        reading.append(asyncio.create_task(_read(ask, number, connection, crowd)))
    crowd.opened_in, crowd.open_at_once = time.monotonic() - began, sum(not task.done() for task in reading)
    crowd.while_open = held()
    await asyncio.gather(*reading)
    crowd.is_over = True
    await watching


def asks_for(known_canaries: list[Canary], count: int) -> list[Ask]:
    """Chats as streams, one canary after the other."""
    return [streamed(asks_of(canary)[0]) for canary in islice(cycle(known_canaries), count)]


def run(num_streams: int, max_running: int, num_tokens: int, num_held: int) -> int:
    """The campaign; the number of troubles."""
    with library() as llm:
        held_open = known(llm, [replace(each, num_tokens=num_held) for each in canaries(8)])
        known_canaries = known(llm, [replace(each, num_tokens=num_tokens) for each in canaries(40)])
    crowd = Crowd()
    asks = asks_for(held_open, max_running) + asks_for(known_canaries, num_streams - max_running)
    with serving("--max-running", str(max_running)) as server:
        asyncio.run(open_all(server.port, asks_for(known_canaries, max_running), Crowd()))
        settle(server.look)
        before = server.held()
        began = time.monotonic()
        asyncio.run(open_all(server.port, asks, crowd, server.held))
        seconds, found, after = time.monotonic() - began, settle(server.look), server.held()
        crowd.troubles += [*left_by(found), *server.complaints, *server.end()]
    assert crowd.while_open is not None
    crowd.check(max_running)
    print(
        dumps(
            {
                "streams": num_streams,
                "max_running": max_running,
                "seconds": round(seconds, 1),
                "opened_in": round(crowd.opened_in, 1),
                "open_at_once": crowd.open_at_once,
                "first_token_seconds_max": round(max(crowd.to_first), 1),
                "out_of_order": crowd.most_out_of_order,
                "silence_max": round(max(crowd.silences), 2),
                "pings": crowd.num_pings,
                "health_ms_p50": round(1e3 * percentile(crowd.health_seconds, 0.5), 1),
                "health_ms_p99": round(1e3 * percentile(crowd.health_seconds, 0.99), 1),
                "health_asked": len(crowd.health_seconds),
            }
        )
    )
    more = crowd.while_open.memory - before.memory
    print(
        f"memory {megabytes(before.memory)} before, {megabytes(crowd.while_open.memory)} with all open "
        f"({more / 1e3 / crowd.open_at_once:.1f} kB a stream), {megabytes(after.memory)} after"
    )
    return told(crowd.troubles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=40, help="of each answer")
    parser.add_argument("--held", type=int, default=400, help="tokens of the first answers, until all streams are open")
    args = parser.parse_args()
    sys.exit(1 if run(args.streams, args.max_running, args.tokens, args.held) else 0)


if __name__ == "__main__":
    main()
