"""An hour like any other, and whether anything grows in it.

    scripts/soak --minutes 60
    scripts/soak --minutes 5 --kill-every 1 --prompt 4000 --out curves

`splitinfer serve` and a worker as real processes, with KV on disk and n-gram drafts. All at the same time:

    chats     requests of every kind, some of whose clients dawdle, go in the middle, or have them cancelled (``storm``)
    agents    conversations that share a beginning of ``--prompt`` tokens; each begins anew when it has ended
    watchers  the page, its figures, the meters and the health, read again and again
    kills     the worker is killed (-9) every ``--kill-every`` minutes, and started again

Every whole answer of a canary and of an agent is compared with what the library said beforehand. What the processes
hold is sampled every ``--every`` seconds: memory, descriptors, threads, bytes on disk. At the end a table has the
medians of each sixth of the time, and the last third of each curve is compared with the third before it. ``--out``
names files without their ending: a line of JSON for each sample (.jsonl), and the curves in the table's order, with a
red line where the worker was killed (.png). What was wrong is printed, and the exit code is 1.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

import psutil

from splitinfer.core.json_text import dumps
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM

from .asks import WORDS, Canary, canaries, known
from .client import Connection, Gone, request
from .curves import paint, table
from .serving import RestartedWorker, Serving, left_by, library, restarted_worker, serving, settle, told
from .storm import Client, Weather, draw

_TURNS, _ANSWER = 4, 24
_MOST_MORE = {"memory": 48e6, "descriptors": 8, "threads": 8, "disk": 64e6}
"""By how much the last third of a curve may lie above the one before."""


@dataclass(frozen=True)
class Turn:
    """What an agent sends, and what is said to it."""

    prompt: str
    expected: str


@dataclass
class Soak:
    """What was seen so far. ``curves``: what was held, by name."""

    until: float
    weather: Weather = field(default_factory=Weather)
    curves: list[dict[str, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    killed: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def wrong(self, what: str) -> None:
        self.weather.troubles.append(what)


# -- what is asked ---------------------------------------------------------------------------------


def conversations(llm: LLM, num_agents: int, num_tokens: int) -> list[list[Turn]]:
    """Each agent's turns, with what the library says to them. The beginning has about ``num_tokens`` tokens."""
    chance, text = random.Random("soak"), ""
    while len(llm.encode(text)) < num_tokens:
        text += " ".join(chance.choice(WORDS) for _ in range(200)) + " "
    prompts, turns = (
        [f"{text}\nAgent {number}: " for number in range(num_agents)],
        [list[Turn]() for _ in range(num_agents)],
    )
    for turn in range(_TURNS):
        params = SamplingParams(max_tokens=_ANSWER, temperature=0.0)
        outputs = llm.generate(prompts, [params] * num_agents)
        for number, output in enumerate(outputs):
            turns[number].append(Turn(prompts[number], output.text))
            prompts[number] += f"{output.text}\nTool {turn} of {number}: {' '.join(chance.choices(WORDS, k=12))}\n"
    return turns


async def agent(port: int, turns: Sequence[Turn], soak: Soak) -> None:
    """One conversation after the other."""
    while not soak.is_over:
        for turn in turns:
            if soak.is_over:
                return
            body = {"prompt": turn.prompt, "max_tokens": _ANSWER, "temperature": 0}
            try:
                async with Connection(port) as connection:
                    await connection.send(request("POST", "/v1/completions", body))
                    answer = await connection.head()
                    document = json.loads(await connection.body(answer))
            except Gone as error:
                soak.wrong(f"an agent: {error}")
                continue
            if answer.status == 429:
                await asyncio.sleep(0.5)
                continue
            text = document["choices"][0]["text"] if answer.status == 200 else f"{answer.status} {document}"
            soak.counts["turns"] += 1
            soak.counts["cached"] += document.get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens", 0)
            if text != turn.expected:
                soak.wrong(f"an agent was told {text[:200]!r}, not {turn.expected!r}")
            await asyncio.sleep(0.2)


async def chats(port: int, which: int, known_canaries: Sequence[Canary], soak: Soak) -> None:
    """Requests of every kind."""
    chance = random.Random(f"soak {which}")
    own, number = Client(port, chance, soak.weather), which
    while not soak.is_over:
        ask, fate = draw(number, 7, known_canaries)
        await own.ask(ask, fate, f"soak-{number}")
        number += 1000
        soak.counts["chats"] += 1
        await asyncio.sleep(chance.uniform(0, 0.5))
    own.leave()


async def watcher(port: int, path: str, soak: Soak) -> None:
    """A path, read again and again."""
    while not soak.is_over:
        async with Connection(port) as connection:
            await connection.send(request("GET", path))
            answer = await connection.head()
            await connection.body(answer)
        soak.counts[f"GET {path}"] += 1
        if answer.status != 200 and not (path == "/health" and answer.status == 503):
            soak.wrong(f"{path} is answered with {answer.status}")
        await asyncio.sleep(1.0)


async def kills(worker: RestartedWorker, minutes: float, soak: Soak) -> None:
    """The worker is gone, and comes back."""
    at = time.monotonic() + minutes * 60
    while not soak.is_over:
        await asyncio.sleep(0.5)
        if time.monotonic() >= at and soak.until - at > 30:
            soak.killed.append(soak.seconds)
            await asyncio.to_thread(worker.kill)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(worker.start_again)
            soak.counts["kills"] += 1
            at += minutes * 60


# -- what is held ----------------------------------------------------------------------------------


async def samples(
    server: Serving, worker: RestartedWorker, disk: Path, seconds: float, soak: Soak, out: TextIO | None
) -> None:
    """What is held, every so many seconds."""
    while not soak.is_over:
        await asyncio.sleep(seconds)
        try:
            found = _sample([server.running.process, *server.workers, worker.process], disk)
        except psutil.Error:
            continue  # it was killed just now
        found |= {"at": round(soak.seconds, 1), "compared": soak.weather.num_compared, **soak.counts}
        soak.curves.append(found)
        if out is not None:
            print(dumps(found), file=out, flush=True)


def _sample(processes: Sequence[psutil.Process], disk: Path) -> dict[str, float]:
    return {
        "memory": sum(each.memory_info().rss for each in processes),
        "descriptors": sum(each.num_fds() for each in processes),
        "threads": sum(each.num_threads() for each in processes),
        "disk": sum(path.stat().st_size for path in disk.rglob("*") if path.is_file()),
    }


def not_flat(curves: Sequence[dict[str, float]]) -> list[str]:
    """What has grown: by the medians of the last third and of the one before."""
    third = len(curves) // 3
    if third < 2:
        return []
    found = []
    for name, most in _MOST_MORE.items():
        before, last = (
            statistics.median(one[name] for one in part) for part in (curves[third:-third], curves[-third:])
        )
        if last - before > most:
            found.append(f"{name} grew from {before:,.0f} to {last:,.0f}")
    return found


# -- all of it -------------------------------------------------------------------------------------


async def _everything(
    server: Serving, worker: RestartedWorker, turns: Sequence[Sequence[Turn]], known_canaries: Sequence[Canary],
    disk: Path, given: argparse.Namespace, soak: Soak, out: TextIO | None,
) -> None:  # fmt: skip
    port = server.port
    await asyncio.gather(
        *(chats(port, which, known_canaries, soak) for which in range(given.clients)),
        *(agent(port, each, soak) for each in turns),
        *(watcher(port, path, soak) for path in ("/", "/metrics", "/health")),
        kills(worker, given.kill_every, soak),
        samples(server, worker, disk, given.every, soak, out),
    )


def run(given: argparse.Namespace) -> int:
    """The campaign; the number of troubles."""
    context = given.prompt + 4096
    with library(context) as llm:
        known_canaries, turns = known(llm, canaries(24)), conversations(llm, given.agents, given.prompt)
    with ExitStack() as stack:
        out = stack.enter_context(open(f"{given.out}.jsonl", "w", encoding="utf-8")) if given.out else None
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True)))
        front, back = (("--kv-dir", str(disk / name), "--kv-disk-gb", str(given.disk_gb)) for name in ("front", "back"))
        worker = stack.enter_context(restarted_worker(*back))
        more = ("--kv-gb", str(given.kv_gb), "--draft", "ngram")
        server = stack.enter_context(serving(*front, *more, workers=[worker.address], context=context))
        soak = Soak(time.monotonic() + 60 * given.minutes)
        try:
            asyncio.run(_everything(server, worker, turns, known_canaries, disk, given, soak, out))
        except OSError as error:
            print(f"WRONG: {error}; the server: {server.running.state()}\nthe worker: {worker.state()}", flush=True)
            raise
        soak.weather.troubles += [*left_by(settle(server.look)), *server.end()]
    if soak.curves:
        print(table(soak.curves, (*_MOST_MORE, "compared", "turns", "cached", "kills")))
    if given.out and soak.curves:
        paint(Path(f"{given.out}.png"), soak.curves, (*_MOST_MORE, "compared", "turns", "cached"), soak.killed)
    soak.weather.troubles += not_flat(soak.curves)
    print(f"{given.minutes:g} minutes: {dict(soak.counts)}; {soak.weather.num_compared:,} chats compared")
    return told(soak.weather.troubles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=5.0, help="minutes")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=20_000, help="tokens that the agents' prompts share")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two lines of the curves")
    parser.add_argument("--kv-gb", type=float, default=0.05, help="little, so that KV is given up")
    parser.add_argument("--disk-gb", type=float, default=0.05, help="of each; little, so that it is full long before")
    parser.add_argument("--out", help="of the curves: the name of two files, without .jsonl and .png")
    signal.signal(signal.SIGTERM, _end)
    sys.exit(1 if run(parser.parse_args()) else 0)


def _end(number: int, _frame: FrameType | None) -> None:
    """Leave no process behind."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
