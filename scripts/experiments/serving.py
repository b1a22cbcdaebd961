"""Requests that come at random to a server with OpenAI's API, and what long prompts do to the streams. Prints JSON.

    splitinfer serve --layout halves.yaml --itl-slo-ms 300
    python scripts/experiments/serving.py --rate 0.5 --requests 60 --long 3 --prompt 200 --long-prompt 4000

Requests arrive as a Poisson process, each with a prompt of its own; every n-th (``--long``) has a long one. TTFT and
the gaps between events with text (ITL) are a client's, so what HTTP costs is in them. ``within`` is the share of gaps
that keep to ``--objective`` (seconds). It measures any server with this API, mlx-lm's own too.
"""

import argparse
import json
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Answer:
    """One request: when it was sent, and the times of its events with text; why it failed, if it did."""

    sent: float
    is_long: bool
    times: list[float] = field(default_factory=list)
    failed: str = ""


def ask(given: argparse.Namespace, answer: Answer, seed: int) -> None:
    """Send one request and read its stream."""
    chance, at = random.Random(f"{given.seed} {seed}"), urlsplit(given.url)
    length = given.long_prompt if answer.is_long else given.prompt
    prompt = " ".join(str(chance.randrange(1000)) for _ in range(length))
    body = {
        "model": given.model, "messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0,
        "max_tokens": 1 if answer.is_long else given.tokens,
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {given.key}"}
    connection = HTTPConnection(at.hostname or "127.0.0.1", at.port, timeout=600)
    try:
        connection.request("POST", f"{at.path}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{response.status}: {response.read(300).decode(errors='replace')}")
        for line in response:
            text = line.removeprefix(b"data: ").strip()
            if text.startswith(b"{") and any(each["delta"].get("content") for each in json.loads(text)["choices"]):
                answer.times.append(time.monotonic())
    except (OSError, ValueError, KeyError) as error:
        answer.failed = f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Send all requests, and wait for their ends."""
    chance, began, at = random.Random(given.seed), time.monotonic(), 0.0
    answers, threads = list[Answer](), list[threading.Thread]()
    for number in range(given.requests):
        time.sleep(max(0.0, began + at - time.monotonic()))
        answers.append(Answer(time.monotonic(), bool(given.long) and number % given.long == given.long - 1))
        threads.append(threading.Thread(target=ask, args=(given, answers[-1], number)))
        threads[-1].start()
        at += chance.expovariate(given.rate)
    for thread in threads:
        thread.join()
    took, ends = time.monotonic() - began, [answer for answer in answers if answer.times]
    gaps = [b - a for answer in ends for a, b in pairwise(answer.times)]
    return {
        "rate": given.rate, "requests": given.requests, "seconds": took,
        "events_per_second": sum(len(answer.times) for answer in ends) / took,
        "ttft": quantiles([answer.times[0] - answer.sent for answer in ends if not answer.is_long]),
        "ttft_of_long_prompts": quantiles([answer.times[0] - answer.sent for answer in ends if answer.is_long]),
        "itl": quantiles(gaps),
        "within": sum(gap <= given.objective for gap in gaps) / len(gaps) if gaps else None,
        "failed": sorted({answer.failed for answer in answers if answer.failed}),
    }  # fmt: skip


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Seconds: the median, what 99 % do not exceed, and the longest."""
    ordered = sorted(values)
    return {
        name: ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        if ordered
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--key", default="none", help="an API key, if the server wants one")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--prompt", type=int, default=100, help="words of a prompt, which are numbers")
    parser.add_argument("--long", type=int, default=0, help="every n-th request has a long prompt; 0: none has")
    parser.add_argument(
        "--long-prompt", type=int, default=3000, help="words of a long prompt, which is answered by one token"
    )
    parser.add_argument("--objective", type=float, default=0.3, help="seconds between two tokens")
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
