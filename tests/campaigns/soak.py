"""A server's day in short, and whether anything grows in it.

`splitinfer serve` and a worker as real processes, with KV on disk and n-gram drafts. All at the same time:

    chats     requests of every kind, whose clients read, dawdle, go in the middle, or have them cancelled
    agents    conversations that share a beginning of ``--prompt`` tokens; each begins anew when it has ended
    watchers  the page, its figures, the meters and the health, read again and again
    kills     the worker is killed (-9) every ``--kill-every`` minutes, and started again
    the end   the server is told to end under streams, short and endless ones

Every whole answer of a canary and of an agent is compared with what the library said beforehand. What the processes
hold (memory, descriptors, threads, bytes on disk) is sampled, and in a run of ten minutes or more the last third of
each curve is compared with the third before it. When nobody asks any more, no KV, request or connection is held.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2 as httpx
import psutil

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM

from .asking import FATES, SECONDS, WORDS, Ask, Canary, canaries, draw, ended, known, streams_of, under_load
from .report import Report
from .serving import RestartedWorker, Serving, library, serving

_TURNS, _ANSWER = 4, 24
_CLIENTS, _AGENTS = 6, 3
_LITTLE_GB = "0.05"  # of KV, in memory and on each disk, so that it is given up
_MOST_SAMPLES = 1000
_JUDGED_MINUTES = 10.0  # before, processes still take what they need
_MOST_MORE = {"memory": 48e6, "descriptors": 8, "threads": 8, "disk": 64e6}
"""By how much the last third of a curve may lie above the one before."""
_ENDLESS = 3000  # tokens of an answer that the server's end cuts short


@dataclass(frozen=True)
class Turn:
    prompt: str
    expected: str


@dataclass
class Soak:
    """What was seen so far. ``curves``: what was held, by name."""

    report: Report
    server: Serving
    worker: RestartedWorker
    said: Sequence[Canary]
    curves: list[dict[str, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    # -- who asks --------------------------------------------------------------------------------

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=SECONDS)

    async def agent(self, turns: Sequence[Turn]) -> None:
        async with self.http() as http:
            while not self.report.is_over:
                for turn in turns:
                    body = {"prompt": turn.prompt, "max_tokens": _ANSWER, "temperature": 0}
                    found = await ended(http, Ask("/v1/completions", body, turn.expected))
                    self.counts["turns"] += 1
                    self.report.check(not found.wrong, f"an agent: {found.wrong}")
                    await asyncio.sleep(0.5 if found.how == "turned away" else 0.2)

    async def chats(self, which: int) -> None:
        chance = self.report.chance("client", which)
        async with self.http() as http:
            while not self.report.is_over:
                ask, (fate,) = draw(chance, self.said), chance.choices([*FATES], [*FATES.values()])
                self.counts["chats"] += 1
                found = await ended(http, ask, fate, chance.uniform(0, 1.0), f"soak-{which}-{self.counts['chats']}")
                self.counts[f"{fate}: {found.how}"] += 1
                is_right = not found.wrong and found.how in ("whole", "turned away", "gone")
                self.report.check(is_right, f"{ask.path}, {fate}: {found.how}: {found.wrong}")
                await asyncio.sleep(chance.uniform(0, 0.5))

    async def watcher(self, path: str) -> None:
        async with self.http() as http:
            while not self.report.is_over:
                status = (await http.get(path)).status_code
                self.counts[f"GET {path}"] += 1
                may_wait = path == "/health" and status == 503
                self.report.check(status == 200 or may_wait, f"{path} is answered with {status}")
                await asyncio.sleep(1.0)

    async def kills(self, every: float) -> None:
        """The worker is gone, and comes back. ``every``: so many seconds."""
        at = time.monotonic() + every
        while not self.report.is_over:
            await asyncio.sleep(0.2)
            if time.monotonic() >= at:
                await asyncio.to_thread(self.worker.kill)
                await asyncio.sleep(1.0)
                await asyncio.to_thread(self.worker.start_again)
                self.counts["kills"] += 1
                at += every

    async def samples(self, disk: Path) -> None:
        every = max(1.0, 60 * self.report.minutes / _MOST_SAMPLES)
        while not self.report.is_over:
            await asyncio.sleep(every)
            try:
                found = _held([self.server.running.process, *self.server.workers, self.worker.process], disk)
            except psutil.Error:
                continue  # it was killed just now
            self.curves.append({"at": round(self.report.seconds, 1), **found})

    # -- the whole -------------------------------------------------------------------------------

    async def everything(self, agents: Sequence[Sequence[Turn]], kill_every: float, disk: Path) -> None:
        await asyncio.gather(
            *(self.chats(which) for which in range(_CLIENTS)),
            *(self.agent(turns) for turns in agents),
            *(self.watcher(path) for path in ("/", "/metrics", "/health", "/v1/splitinfer/figures")),
            self.kills(kill_every),
            self.samples(disk),
        )

    def end_under_streams(self) -> None:
        """The server is told to end: streams end as their APIs say, new requests are refused, and it is gone."""
        chance = self.report.chance("end")
        endless = [replace(each, num_tokens=_ENDLESS) for each in self.said[:4]]
        asks = chance.sample([ask for each in (*self.said[4:], *endless) for ask in streams_of(each)], 24)
        asks += streams_of(endless[0])
        found = asyncio.run(under_load(self.server.url, asks, chance.uniform(0.1, 0.6), self.server.tell_to_end))
        wrong = [f"{each.ask.path}: {each.how}: {each.wrong}" for each in found if each.wrong]
        self.report.expect_none([*self.server.ended(), *wrong], "at the end")
        self.counts.update(f"{each.how} at the end" for each in found)


def conversations(llm: LLM, num_agents: int, num_tokens: int) -> list[list[Turn]]:
    """Each agent's turns, with what the library says to them. The beginning has about ``num_tokens`` tokens."""
    chance, text = random.Random("soak"), ""
    while len(llm.tokenizer.encode(text)) < num_tokens:
        text += " ".join(chance.choice(WORDS) for _ in range(200)) + " "
    prompts = [f"{text}\nAgent {number}: " for number in range(num_agents)]
    turns = [list[Turn]() for _ in prompts]
    for turn in range(_TURNS):
        outputs = llm.generate(prompts, [SamplingParams(max_tokens=_ANSWER, temperature=0.0)] * num_agents)
        for number, output in enumerate(outputs):
            turns[number].append(Turn(prompts[number], output.text))
            prompts[number] += f"{output.text}\nTool {turn} of {number}: {' '.join(chance.choices(WORDS, k=12))}\n"
    return turns


def _held(processes: Sequence[psutil.Process], disk: Path) -> dict[str, float]:
    return {
        "memory": sum(each.memory_info().rss for each in processes),
        "descriptors": sum(each.num_fds() for each in processes),
        "threads": sum(each.num_threads() for each in processes),
        "disk": sum(path.stat().st_size for path in disk.rglob("*") if path.is_file()),
    }


def not_flat(curves: Sequence[dict[str, float]]) -> list[str]:
    """What has grown: by the medians of the last third and of the one before."""
    third, found = len(curves) // 3, []
    for name, most in _MOST_MORE.items() if third else ():
        parts = (curves[third:-third], curves[-third:])
        before, last = (statistics.median(one[name] for one in part) for part in parts)
        if last - before > most:
            found.append(f"{name} grew from {before:,.0f} to {last:,.0f}")
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kill-every", type=float, help="minutes; without, five, or a third of all where that is less")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens that the agents' prompts share")


def campaign(report: Report, given: argparse.Namespace) -> None:
    context = given.prompt + 4096
    with library(context) as llm:
        said, turns = known(llm, canaries(24)), conversations(llm, _AGENTS, given.prompt)
    kill_every = 60 * (given.kill_every or min(5.0, report.minutes / 3))
    with ExitStack() as stack:
        disk = report.folder / "kv"
        front, back = (("--kv-dir", str(disk / name), "--kv-disk-gb", _LITTLE_GB) for name in ("front", "back"))
        worker = stack.enter_context(closing(RestartedWorker(*back)))
        more = (*front, "--kv-gb", _LITTLE_GB, "--draft", "ngram", "--drain-seconds", "2")
        server = stack.enter_context(serving(*more, workers=[worker.address], context=context))
        soak = Soak(report, server, worker, said)
        report.begin()
        asyncio.run(soak.everything(turns, kill_every, disk))
        report.expect_none(server.left())
        soak.end_under_streams()
        report.expect_none(server.complaints)
    if report.minutes >= _JUDGED_MINUTES:
        report.expect_none(not_flat(soak.curves))
    report.figures |= {**soak.counts, "curves": soak.curves}
