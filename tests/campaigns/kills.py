"""A worker is killed under streams over HTTP, again and again; nobody's text changes, and no stream is silent for long.

    python -m tests.campaigns.kills --kills 20
    python -m tests.campaigns.kills --kills 4 --away 20 --streams 2

Two stages, real processes, eight streams of all APIs at a time. Somewhere in their middle the worker is killed (-9) and
started again: at once, or for every fourth kill after ``--away`` seconds, so that pings have to fill the silence. Every
text must be what it is undisturbed. The longest time in which a stream got no byte is printed.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from splitinfer.core.json_text import dumps
from splitinfer.server.stream import PING_EVERY

from .asks import Ask, canaries, complaint, known, streams_of, text_of_events
from .client import Connection, Event, Gone, request
from .serving import RestartedWorker, left_by, library, restarted_worker, serving, settle, told

NUM_TOKENS = 160
_SILENT = PING_EVERY + 4.0  # seconds; a ping is late on a machine that is busy with other things
_EVERY_FOURTH = 4


@dataclass
class Read:
    """A stream that was read: its text, what was wrong with it, how many pings it had, its longest silence in
    seconds."""

    ask: Ask
    text: str = ""
    wrong: str = ""
    num_pings: int = 0
    silence: float = 0.0
    events: list[Event] = field(default_factory=list)


async def read(port: int, ask: Ask, read_so_far: Read) -> Read:
    """A whole stream."""
    async with Connection(port) as connection:
        await connection.send(request("POST", ask.path, ask.body))
        try:
            answer = await connection.head()
            async for event in connection.events(answer):
                read_so_far.events.append(event)
        except Gone as error:
            read_so_far.wrong = f"{error}"
        read_so_far.silence = connection.silence
    events = read_so_far.events
    read_so_far.text = text_of_events(ask.api, events)
    read_so_far.num_pings = sum(event.data is None or event.name == "ping" for event in events)
    read_so_far.wrong = read_so_far.wrong or complaint(ask, events)
    return read_so_far


async def trial(port: int, worker: RestartedWorker, asks: Sequence[Ask], moment: float, away: float) -> list[Read]:
    """Streams, in whose middle the worker is killed; it is started again after ``away`` seconds. ``moment``: which part
    of the first stream's text was there, from 0 to 1."""
    reads = [Read(ask) for ask in asks]
    reading = [asyncio.create_task(read(port, ask, each)) for ask, each in zip(asks, reads, strict=True)]
    while len(text_of_events(asks[0].api, reads[0].events)) < moment * len(asks[0].expected or ""):
        if reading[0].done():
            break
        await asyncio.sleep(0.005)
    await asyncio.to_thread(worker.kill)
    await asyncio.sleep(away)
    worker.start_again()
    return list(await asyncio.gather(*reading))


def run(num_kills: int, num_streams: int, seed: int, away: float) -> int:
    """The campaign; the number of troubles."""
    with library() as llm:
        known_canaries = known(llm, [replace(each, num_tokens=NUM_TOKENS) for each in canaries(8)])
    all_asks = [ask for canary in known_canaries for ask in streams_of(canary)]
    troubles, silences, num_pings, began = list[str](), list[float](), 0, time.monotonic()
    with restarted_worker() as worker, serving(workers=[worker.address]) as server:
        for number in range(num_kills):
            chance = random.Random(f"{seed} {number}")
            asks = chance.sample(all_asks, num_streams)
            is_away = away if number % _EVERY_FOURTH == 0 else 0.0
            reads = asyncio.run(trial(server.port, worker, asks, chance.uniform(0.05, 0.7), is_away))
            troubles += [f"kill {number}: {wrong}" for wrong in wrong_with(reads)]
            troubles += [f"kill {number}: {wrong}" for wrong in left_by(settle(server.look))]
            silences.append(max(each.silence for each in reads))
            num_pings += sum(each.num_pings for each in reads)
            seen = {"kill": number, "away": is_away, "silence": round(silences[-1], 2), "troubles": len(troubles)}
            print(dumps(seen), flush=True)
        troubles += [*server.complaints, *server.end()]
    print(
        f"{num_kills} kills under {num_streams} streams in {time.monotonic() - began:,.0f} s: "
        f"longest silence {max(silences):.2f} s, {num_pings} pings"
    )
    return told(troubles)


def wrong_with(reads: Sequence[Read]) -> list[str]:
    """What is not as it is undisturbed."""
    found = []
    for each in reads:
        if each.wrong or each.text != each.ask.expected:
            found.append(f"{each.ask.kind}: {each.wrong or 'another text'}: {each.text!r}, not {each.ask.expected!r}")
        if each.silence > _SILENT:
            found.append(f"{each.ask.kind}: {each.silence:.1f} s without a byte")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--away", type=float, default=20.0, help="seconds without the worker, for every fourth kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(1 if run(args.kills, args.streams, args.seed, args.away) else 0)


if __name__ == "__main__":
    main()
