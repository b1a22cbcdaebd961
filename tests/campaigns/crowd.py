"""Strangers who hold connections for nothing, by hundreds, while somebody with a key is served.

    python -m tests.campaigns.crowd --strangers 1000 --seconds 60 --max-connections 600

Real processes, two stages. Strangers have no key. Each opens a connection and holds it as long as it can, in one of
these ways, and comes again within a second when it has lost it:

    silent        says nothing
    slow head     sends a head a byte a second
    slow body     is refused, and goes on sending its body
    unread        asks again and again, and never reads
    half          says half a request, and then nothing

Meanwhile a client with a key asks for answers, one after the other. Each must come, and be what the library says; no
connection of its own may be lost and none of its requests refused. Printed: how many connections the strangers made,
how many the server held at most, and what became of the client's requests.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from splitinfer.core.json_text import dumps

from .asks import Ask, canaries, complaint, known, text_of_events
from .client import Connection, Gone, request
from .kills import asks_of
from .serving import Serving, library, megabytes, percentile, serving, settle

KEY = {"Authorization": "Bearer sesame"}
WAYS = ("silent", "slow head", "slow body", "unread", "half")
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_LOOK_EVERY = 2.0  # seconds


@dataclass
class Siege:
    """What was seen."""

    made: Counter[str] = field(default_factory=Counter)
    most_held: int = 0
    answered: list[float] = field(default_factory=list)  # seconds
    troubles: list[str] = field(default_factory=list)


async def stranger(port: int, which: int, siege: Siege) -> None:
    """Holds connections, one after the other."""
    way, chance = WAYS[which % len(WAYS)], random.Random(which)
    while True:
        try:
            async with Connection(port, is_slow=True) as connection:
                siege.made[way] += 1
                await _hold(connection, way)
        except (Gone, OSError):
            await asyncio.sleep(chance.uniform(0.0, 1.0))


async def _hold(connection: Connection, way: str) -> None:
    match way:
        case "silent":
            await connection.read()
        case "slow head":
            for byte in _HEAD * 10:
                await connection.send(bytes([byte]))
                await asyncio.sleep(1.0)
        case "slow body":
            await connection.send(_HEAD + b"Content-Length: 1000000\r\n\r\n")
            while True:
                await connection.send(b"x")
                await asyncio.sleep(0.5)
        case "unread":
            while True:
                await connection.send(request("GET", "/v1/models") * 20)
                await asyncio.sleep(1.0)
        case _:
            await connection.send(_HEAD[: len(_HEAD) // 2])
            await connection.read()


async def served(port: int, asks: list[Ask], seconds: float, siege: Siege) -> None:
    """The client with a key, each time on a new connection."""
    loop = asyncio.get_running_loop()
    give_up, number = loop.time() + seconds, 0
    while loop.time() < give_up:
        ask, number, began = asks[number % len(asks)], number + 1, loop.time()
        try:
            async with Connection(port) as connection:
                await connection.send(request("POST", ask.path, ask.body, KEY))
                answer = await connection.head()
                if answer.status != 200:
                    siege.troubles.append(f"{ask.kind} got {answer.status}: {await connection.body(answer)!r}")
                    continue
                events = [event async for event in connection.events(answer)]
        except (Gone, OSError) as error:
            siege.troubles.append(f"{ask.kind}: {error or type(error).__name__}")
            continue
        siege.answered.append(loop.time() - began)
        if (wrong := complaint(ask, events)) or text_of_events(ask.api, events) != ask.expected:
            siege.troubles.append(f"{ask.kind}: {wrong or 'another text'}")


async def besiege(server: Serving, asks: list[Ask], num_strangers: int, seconds: float, siege: Siege) -> None:
    """Strangers and the client."""
    strangers = [asyncio.create_task(stranger(server.port, which, siege)) for which in range(num_strangers)]

    async def watch() -> None:
        while True:
            siege.most_held = max(siege.most_held, (await asyncio.to_thread(server.look))["held"]["connections"])
            await asyncio.sleep(_LOOK_EVERY)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(2.0)
    await served(server.port, asks, seconds, siege)
    for task in (watching, *strangers):
        task.cancel()
    await asyncio.gather(watching, *strangers, return_exceptions=True)


def run(num_strangers: int, seconds: float, most: int) -> int:
    """The campaign; the number of troubles."""
    with library() as llm:
        asks = [ask for canary in known(llm, canaries(6)) for ask in asks_of(canary)]
    siege, began = Siege(), time.monotonic()
    with serving("--max-connections", str(most), "--api-key", "sesame") as server:
        before = server.held()
        asyncio.run(besiege(server, asks, num_strangers, seconds, siege))
        found, after = settle(server.look, 90.0), server.held()
        siege.troubles += [f"held by nobody: {found['held']}"] if any(found["held"].values()) else []
        siege.troubles += [*(f"its log says: {line}" for line in server.failures[:5]), *server.end()]
    if not siege.answered or siege.most_held > most + 64:
        siege.troubles.append(f"{len(siege.answered)} answers, {siege.most_held} connections at most")
    print(
        dumps({
            "strangers": num_strangers, "seconds": round(time.monotonic() - began, 1), "connections": siege.made,
            "held_at_most": siege.most_held, "answered": len(siege.answered),
            "seconds_p50": round(percentile(siege.answered or [0.0], 0.5), 2),
            "seconds_max": round(max(siege.answered, default=0.0), 2),
        })
    )  # fmt: skip
    print(f"memory {megabytes(before.memory)} before, {megabytes(after.memory)} after")
    for trouble in siege.troubles[:20]:
        print(f"WRONG: {trouble}")
    return len(siege.troubles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strangers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-connections", type=int, default=600)
    args = parser.parse_args()
    sys.exit(1 if run(args.strangers, args.seconds, args.max_connections) else 0)


if __name__ == "__main__":
    main()
