"""Damaged requests over raw sockets against a real server of two stages, by the thousand.

    python -m tests.campaigns.mutations --requests 20000 --seed 1
    python -m tests.campaigns.mutations --seed 1 --only 3:1234      # one of them again: thread 3, its 1,234th

What is sent: ``mutating``. Each must be answered within ten seconds, never with a status of 500 or more, and refusals
in the form of the API that was asked; afterwards the connection is usable, or closed. In the end: the process's memory
is where it was after half of the requests, its log has no traceback, nothing is under way, and 100 valid requests are
answered exactly as before. What was wrong is printed with the request that showed it, and the exit code is 1.
"""

import argparse
import collections
import json
import random
import re
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from judging import verdict
from mutating import BODIES, JSON, WITHOUT_BODY, Asked, Sent, sent, written
from processes import Running, write_layout
from raw_http import Connection, Exchange

_SECONDS = 10.0  # for an answer
_TIMEOUT = b"X-Splitinfer-Timeout: 3\r\n"  # a request that lost its max_tokens ends
_MOST_GROWTH = 32 << 20  # bytes of the process's memory
_NOT_SAME = ("id", "created", "x-request-id", "call_id", "item_id")
_WRONG_IN_LOG = re.compile(r"Traceback|failed: \w+Error|Exception|never retrieved")
_MOST_SHOWN = 20


@dataclass
class Tally:
    """What all threads have seen."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    troubles: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: Sent, came: Exchange, wrong: str | None, name: str) -> None:
        with self.lock:
            self.done += 1
            for said in came.answers:
                self.statuses[str(said.status)] += 1
            if not came.answers:
                self.statuses["closed without an answer"] += 1
            self.slowest = max(self.slowest, (came.seconds, f"{name} {what.what:.160}"))
            if wrong is not None:
                self.troubles.append(f"{name}: {wrong} | {what.what:.300} | {what.raw[:120]!r}")
                if len(self.troubles) <= _MOST_SHOWN:
                    print(self.troubles[-1], flush=True)


def sent_of(seed: int, thread: int, number: int) -> Sent:
    """What is sent as a thread's ``number``-th. Whole requests end by themselves."""
    made = sent(random.Random(f"{seed}-{thread}-{number}"))
    end = made.raw.find(b"\r\n") + 2
    is_http = end > 2 and b" HTTP/1." in made.raw[:end] and b"wire" not in made.what.encode()
    raw = made.raw.replace(b"\r\nHost: localhost\r\n", b"\r\nHost: localhost\r\n" + _TIMEOUT) if is_http else made.raw
    return Sent(raw, made.paths_are_anthropic, made.num_answers, made.what)


def try_one(port: int, what: Sent) -> tuple[Exchange, str | None]:
    """Send it over a connection of its own; what came, and what was wrong, if anything."""
    with Connection(port, _SECONDS) as connection:
        came = connection.exchange(what.raw, what.num_answers)
        wrong = verdict(what, came)
        closes = bool(came.answers) and came.answers[-1].headers.get("connection") == "close"
        if wrong is None and what.num_answers is not None and not came.is_closed and not closes:
            wrong = _is_usable(connection)
    return came, wrong


def _is_usable(connection: Connection) -> str | None:
    again = connection.exchange(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 1)
    if again.trouble is None and again.answers and again.answers[0].status == 200:
        return None
    return f"the connection is not usable afterwards: {again.trouble}, {[said.status for said in again.answers]}"


def work(port: int, seed: int, thread: int, number: int, tally: Tally) -> None:
    for i in range(number):
        what = sent_of(seed, thread, i)
        try:
            came, wrong = try_one(port, what)
        except OSError as error:
            came, wrong = Exchange(), f"no connection: {error}"
        tally.add(what, came, wrong, f"{thread}:{i}")


# -- before and after ------------------------------------------------------------------------------


def valid_answers(port: int) -> list[Any]:
    """What 100 requests of all routes are answered, without what differs from time to time."""
    found = []
    for i in range(100):
        paths = [*BODIES]
        if i % 20 == 19:
            method, path = WITHOUT_BODY[i // 20]
            asked = Asked(method, path)
        else:
            path = paths[i % len(paths)]
            body = {**BODIES[path]}
            if "temperature" in body:
                body |= {"temperature": 0, "stream": i % 3 == 0} if "messages/" not in path else {}
            asked = Asked("POST", path, (JSON,), json.dumps(body).encode())
        with Connection(port, 60) as connection:
            said = connection.exchange(written(asked), 1).answers[0]
        streams = "event-stream" in said.headers.get("content-type", "")
        found.append((path, said.status, _streamed(said.body) if streams else _same(said.body)))
    return found


def _streamed(body: bytes) -> dict[str, str]:
    """What a stream says in each of its choices or blocks. How many tokens came together differs from time to time."""
    said: dict[str, str] = collections.defaultdict(str)
    for line in body.decode().splitlines():
        if not line.startswith("data: {"):
            said["words"] += line.removeprefix("data: ") if line == "data: [DONE]" else ""
            continue
        data = json.loads(line[6:])
        for choice in data.get("choices", ()):
            delta = choice.get("delta", {})
            said[f"choice {choice['index']}"] += choice.get("text", "") + (delta.get("content") or "")
            said[f"choice {choice['index']}"] += choice["finish_reason"] or ""
        delta = data.get("delta", "")
        said[data.get("type", "")] += delta if isinstance(delta, str) else _same(json.dumps(delta).encode())
        if data.get("type") in ("message_stop", "response.completed", "response.incomplete", "message_delta"):
            said["end"] += data["type"]
    return {name: text for name, text in said.items() if text and name not in ("content_block_delta",)}


def _same(body: bytes) -> str:
    """A body without ids and times."""
    text = body.decode()
    names = "|".join(_NOT_SAME)
    text = re.sub(rf'"({names})": ?("[^"]*"|\d+)', "", text)
    text = re.sub(r'"(created_at|completed_at)": ?[\d.]+', "", text)
    return re.sub(r'"cached_tokens": ?\d+|"(input|cache_read_input)_tokens": ?\d+', "", text)


def run(requests: int, seed: int, num_threads: int, only: str | None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        layout = write_layout(Path(folder), ["local"])
        running = Running("serve", "--layout", str(layout), "--port", "0", "--kv-dir", "none")
        try:
            port = int(running.sees(r"serving demo at http://127.0.0.1:(\d+)/v1", 120)[1])
            if only is not None:
                return _one(port, seed, only, running)
            return _all(port, requests, seed, num_threads, running)
        finally:
            running.end()


def _one(port: int, seed: int, only: str, running: Running) -> int:
    thread, _, number = only.partition(":")
    what = sent_of(seed, int(thread), int(number))
    came, wrong = try_one(port, what)
    print(f"{what.what}\n{what.raw[:2000]!r}\n{came}\n{wrong}\n{running.err[-3000:]}")
    return int(wrong is not None)


def _all(port: int, requests: int, seed: int, num_threads: int, running: Running) -> int:
    before, tally, began = valid_answers(port), Tally(), time.monotonic()
    threads = [
        threading.Thread(target=work, args=(port, seed, i, requests // num_threads, tally)) for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    memory: list[int] = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(1.0)
        if running.is_alive and len(memory) < 10 * tally.done // requests:
            memory.append(running.process.memory_info().rss)
    return _report(port, before, tally, memory, running, time.monotonic() - began)


def _report(port: int, before: list[Any], tally: Tally, memory: list[int], running: Running, seconds: float) -> int:
    troubles = list(tally.troubles)
    print(f"{tally.done:,} in {seconds:.0f} s: {dict(sorted(tally.statuses.items()))}")
    print(f"the slowest took {tally.slowest[0]:.2f} s: {tally.slowest[1]}")
    if not running.is_alive:
        troubles.append("the server has ended")
        print(running.err[-4000:])
    else:
        troubles += _afterwards(port, before, memory, running)
    for line in running.err.splitlines():
        if _WRONG_IN_LOG.search(line):
            troubles.append(f"in the log: {line:.300}")
    for trouble in troubles[:_MOST_SHOWN]:
        print(trouble)
    print(f"{len(troubles)} troubles")
    return int(bool(troubles))


def _afterwards(port: int, before: list[Any], memory: list[int], running: Running) -> list[str]:
    after, found = valid_answers(port), []
    wrong = [(b, a) for b, a in zip(before, after, strict=True) if a != b]
    found += [f"answered {a!r:.400}, before {b!r:.400}" for b, a in wrong[:3]]
    print(f"{len(before) - len(wrong)} of {len(before)} valid requests are answered as before")
    memory.append(running.process.memory_info().rss)
    print(f"memory in MiB: {[size >> 20 for size in memory]}")
    half = memory[len(memory) // 2]  # until then, bodies of 10 MB at a time have taken what they need
    if memory[-1] - half > _MOST_GROWTH:
        found.append(f"memory grew from {half >> 20} to {memory[-1] >> 20} MiB")
    with Connection(port) as connection:
        health = connection.exchange(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 1).answers[0].json
    if health["running"] or health["status"] != "ok":
        found.append(f"afterwards: {health}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--only", metavar="THREAD:NUMBER")
    options = parser.parse_args()
    return run(options.requests, options.seed, options.threads, options.only)


if __name__ == "__main__":
    raise SystemExit(main())
