"""Damaged requests over raw sockets against a real server of two stages, by the thousand.

    python -m tests.campaigns.mutations --requests 20000 --seed 1
    python -m tests.campaigns.mutations --seed 1 --only 1234      # one of them again

What is sent: ``mutating``. Each must be answered within ten seconds, never with a status of 500 or more, and refusals
in the form of the API that was asked; afterwards the connection is usable, or closed. In the end: the process's memory
is where it was after half of the requests, its log has no traceback, nothing is under way, and 100 valid requests are
answered exactly as before. What was wrong is printed with the request that showed it, and the exit code is 1.
"""

import argparse
import json
import random
import re
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from judging import verdict
from mutating import BODIES, JSON, Asked, Sent, sent, written
from processes import Running, write_layout
from raw_http import Connection, Exchange

_SECONDS = 10.0  # for an answer
_TIMEOUT = b"X-Splitinfer-Timeout: 3\r\n"  # a request that lost its max_tokens ends
_MOST_GROWTH = 32 << 20  # bytes of the process's memory
_MOST_SHOWN = 20
_WRONG_IN_LOG = re.compile(r"Traceback|failed: \w+Error|Exception|never retrieved")
_VARIES = "id|created|created_at|completed_at|call_id|item_id|cached_tokens|(cache_read_)?input_tokens"
_NOT_SAME = rf'"({_VARIES})": ?("[^"]*"|[\d.]+)'
_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def sent_of(seed: int, number: int) -> Sent:
    """What is sent as the ``number``-th. Whole requests end by themselves."""
    made = sent(random.Random(f"{seed}-{number}"))
    is_http = b" HTTP/1." in made.raw.partition(b"\r\n")[0] and "wire" not in made.what
    raw = made.raw.replace(b"\r\nHost: localhost\r\n", b"\r\nHost: localhost\r\n" + _TIMEOUT) if is_http else made.raw
    return Sent(raw, made.paths_are_anthropic, made.num_answers, made.what)


def try_one(port: int, what: Sent) -> tuple[Exchange, str | None]:
    """Send it over a connection of its own; what came, and what was wrong, if anything."""
    with Connection(port, _SECONDS) as connection:
        came = connection.exchange(what.raw, what.num_answers)
        wrong = verdict(what, came)
        closes = bool(came.answers) and came.answers[-1].headers.get("connection") == "close"
        if wrong is None and what.num_answers is not None and not came.is_closed and not closes:
            again = connection.exchange(_HEALTH, 1)
            if [said.status for said in again.answers] != [200]:
                wrong = f"the connection is not usable afterwards: {again}"
    return came, wrong


def valid_answers(port: int) -> list[tuple[str, int, str]]:
    """What 100 greedy requests of all routes are answered, without what differs from time to time."""
    found = []
    for path, body in [*BODIES.items()] * 10:
        greedy = {name: 0 if name == "temperature" else value for name, value in body.items() if name != "stream"}
        with Connection(port, 60) as connection:
            asked = Asked("POST", path, (JSON,), json.dumps(greedy).encode())
            said = connection.exchange(written(asked), 1).answers[0]
        found.append((path, said.status, re.sub(_NOT_SAME, "", said.body.decode())))
    return found


def run(num_requests: int, seed: int, num_threads: int, only: int | None) -> list[str]:
    """The campaign; what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        layout = write_layout(Path(folder), ["local"])
        running = Running("serve", "--layout", str(layout), "--port", "0", "--kv-dir", "none")
        try:
            port = int(running.sees(r"serving demo at http://127.0.0.1:(\d+)/v1", 120)[1])
            if only is not None:
                came, wrong = try_one(port, what := sent_of(seed, only))
                print(f"{what.what}\n{what.raw[:2000]!r}\n{came}\n{running.err[-3000:]}")
                return [wrong] if wrong is not None else []
            return _all(port, num_requests, seed, num_threads, running)
        finally:
            running.end()


def _all(port: int, num_requests: int, seed: int, num_threads: int, running: Running) -> list[str]:
    before, began = valid_answers(port), time.monotonic()
    statuses, slowest, troubles, memory = Counter[str](), (0.0, ""), list[str](), list[int]()

    def one(number: int) -> tuple[Sent, Exchange, str | None]:
        what = sent_of(seed, number)
        try:
            return what, *try_one(port, what)
        except OSError as error:
            return what, Exchange(), f"no connection: {error!r}"

    with ThreadPoolExecutor(num_threads) as threads:
        for number, (what, came, wrong) in enumerate(threads.map(one, range(num_requests))):
            statuses.update([str(said.status) for said in came.answers] or ["closed without an answer"])
            slowest = max(slowest, (came.seconds, f"{number} {what.what:.160}"))
            if wrong is not None:
                troubles.append(f"{number}: {wrong} | {what.what:.300} | {what.raw[:120]!r}")
            if running.is_alive and number % (num_requests // 10 or 1) == 0:
                memory.append(running.process.memory_info().rss)
    print(f"{num_requests:,} in {time.monotonic() - began:.0f} s: {dict(sorted(statuses.items()))}")
    print(f"the slowest took {slowest[0]:.2f} s: {slowest[1]}")
    troubles += [f"in the log: {line:.300}" for line in running.err.splitlines() if _WRONG_IN_LOG.search(line)]
    return troubles + (_afterwards(port, before, memory, running) if running.is_alive else ["the server has ended"])


def _afterwards(port: int, before: list[Any], memory: list[int], running: Running) -> list[str]:
    found = [
        f"answered {a!r:.400}, before {b!r:.400}" for b, a in zip(before, valid_answers(port), strict=True) if a != b
    ]
    print(f"{len(before) - len(found)} of {len(before)} valid requests are answered as before")
    memory.append(running.process.memory_info().rss)
    print(f"memory in MiB: {[size >> 20 for size in memory]}")
    half = memory[len(memory) // 2]  # until then, bodies of 10 MB at a time have taken what they need
    if memory[-1] - half > _MOST_GROWTH:
        found.append(f"memory grew from {half >> 20} to {memory[-1] >> 20} MiB")
    with Connection(port) as connection:
        health = connection.exchange(_HEALTH, 1).answers[0].json
    return found + ([f"afterwards: {health}"] if health["running"] or health["status"] != "ok" else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    options = parser.parse_args()
    troubles = run(options.requests, options.seed, options.threads, options.only)
    print("\n".join([*troubles[:_MOST_SHOWN], f"{len(troubles)} troubles"]))
    return int(bool(troubles))


if __name__ == "__main__":
    raise SystemExit(main())
