"""Damaged requests over raw sockets against a real server of two stages.

What is sent: ``mutating``. Each must be answered within ten seconds, never with a status of 500 or more, and refusals
in the form of the API that was asked; afterwards the connection is usable, or closed. In the end: the process's memory
is where it was after half of the requests, its log has no traceback, nothing is under way, and 100 valid requests are
answered exactly as before.
"""

import json
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from judging import verdict
from mutating import BODIES, JSON, Asked, Sent, sent, written
from processes import Running
from raw_http import Connection, Exchange

from .report import Report

_SECONDS = 10.0  # for an answer
_TIMEOUT = b"X-Splitinfer-Timeout: 3\r\n"  # a request that lost its max_tokens ends
_MOST_GROWTH = 32 << 20  # bytes of the process's memory
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


def strike(report: Report, running: Running, port: int, num_threads: int = 8, at_once: int = 200) -> dict[str, Any]:
    """Damaged requests while there is time; what was wrong goes to the report, with the number that makes it again."""
    before, statuses, slowest, memory, number = valid_answers(port), Counter[str](), 0.0, list[int](), 0

    def one(number: int) -> tuple[int, Sent, Exchange, str | None]:
        what = sent_of(report.seed, number)
        try:
            return number, what, *try_one(port, what)
        except OSError as error:
            return number, what, Exchange(), f"no connection: {error!r}"

    with ThreadPoolExecutor(num_threads) as threads:
        while (not memory or not report.is_over) and running.is_alive:
            for which, what, came, wrong in threads.map(one, range(number, number + at_once)):
                statuses.update([str(said.status) for said in came.answers] or ["closed without an answer"])
                slowest = max(slowest, came.seconds)
                if wrong is not None:
                    report.wrong(f"request {which}: {wrong} | {what.what:.300} | {what.raw[:120]!r}")
            memory.append(running.process.memory_info().rss if running.is_alive else 0)
            number += at_once
    report.expect_none(f"in the log: {line:.300}" for line in running.err.splitlines() if _WRONG_IN_LOG.search(line))
    if running.is_alive:
        report.expect_none(_afterwards(port, before, [*memory, running.process.memory_info().rss]))
    else:
        report.wrong("the server has ended")
    return {"requests": number, "statuses": statuses, "slowest_seconds": slowest}


def _afterwards(port: int, before: list[Any], memory: list[int]) -> list[str]:
    found = [
        f"answered {a!r:.400}, before {b!r:.400}" for b, a in zip(before, valid_answers(port), strict=True) if a != b
    ]
    half = memory[len(memory) // 2]  # until then, bodies of 10 MB at a time have taken what they need
    if memory[-1] - half > _MOST_GROWTH:
        found.append(f"memory grew from {half >> 20} to {memory[-1] >> 20} MiB")
    with Connection(port) as connection:
        health = connection.exchange(_HEALTH, 1).answers[0].json
    return found + ([f"afterwards: {health}"] if health["running"] or health["status"] != "ok" else [])
