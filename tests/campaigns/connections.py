"""Kept-alive against new connections, for each client: `/health`, the first token of a stream, a whole short answer.

    python -m tests.campaigns.connections                    # 200 of each; nothing else may run meanwhile
    python -m tests.campaigns.connections --times 20 --within 1000   # whether it works, on a busy machine

Both ways alternate, so that what else happens on the machine meets both. Prints p50 and p99 in milliseconds; 1 if they
are more than ``--within`` apart, if an answer differs, or if a client did not connect as often as it should
have: once where it keeps its connection, each time where it does not.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import requests

from .serving import percentile, serving

_ASKED: Any = [{"role": "user", "content": "Tell me about a wolf."}]
_TOKENS = 4
_connects = [0]
sys.addaudithook(lambda event, _: _connects.__setitem__(0, _connects[0] + (event == "socket.connect")))


@dataclass(frozen=True)
class Client:
    """``make``: one with connections of its own. ``ask``: what is to be timed; the answer."""

    name: str
    make: Callable[[str], Any]
    ask: Callable[[Any, str], str]


def _openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def _first_token(session: requests.Session, url: str) -> str:
    """A stream of one token, read to its end. (openai's client closes its connection at `[DONE]`.)"""
    body = {"messages": _ASKED, "stream": True, "max_tokens": 1, "temperature": 0}
    with session.post(f"{url}/v1/chat/completions", json=body, stream=True) as answer:
        return str([json.loads(line[6:])["choices"] for line in answer.iter_lines() if line.startswith(b"data: {")])


def _whole_of_openai(client: openai.OpenAI, _: str) -> str:
    answer = client.chat.completions.create(model="quick", messages=_ASKED, max_tokens=_TOKENS, temperature=0)
    return str(answer.choices[0].message.content)


def _whole_of_anthropic(client: anthropic.Anthropic, _: str) -> str:
    answer = client.messages.create(model="quick", messages=_ASKED, max_tokens=_TOKENS, extra_body={"temperature": 0})
    return str(answer.content)


CLIENTS = (
    Client("requests, /health", lambda _: requests.Session(), lambda session, url: session.get(f"{url}/health").text),
    Client("requests, first token", lambda _: requests.Session(), _first_token),
    Client("openai, whole answer", _openai, _whole_of_openai),
    Client("anthropic, whole answer", _anthropic, _whole_of_anthropic),
)


def _timed(client: Client, made: Any, url: str) -> tuple[float, str]:
    began = time.perf_counter()
    said = client.ask(made, url)
    return 1000 * (time.perf_counter() - began), said


def measured(client: Client, url: str, times: int, within: float) -> Iterator[str]:
    """Print a client's line; what is wrong with it."""
    with closing(client.make(url)) as kept:
        client.ask(kept, url)
        found: tuple[list[float], list[float]] = [], []
        answers, connects = set[str](), [0, 0]
        for _ in range(times):
            with closing(client.make(url)) as new:
                for place, made in enumerate((kept, new)):
                    before = _connects[0]
                    milliseconds, said = _timed(client, made, url)
                    found[place].append(milliseconds)
                    connects[place] += _connects[0] - before
                    answers.add(said)
    figures = [[percentile(each, share) for each in found] for share in (0.5, 0.99)]
    shown = "   ".join(
        f"{name} {kept_ms:7.2f} {new_ms:7.2f}" for name, (kept_ms, new_ms) in zip(("p50", "p99"), figures, strict=True)
    )
    print(f"{client.name:24} kept, new:   {shown} ms   connections {connects[0] + 1}, {connects[1]}")
    if client.name != CLIENTS[0].name and len(answers) != 1:
        yield f"{client.name}: {len(answers)} different answers"
    if connects != [0, times]:
        yield f"{client.name}: {connects[0] + 1} and {connects[1]} connections, not 1 and {times}"
    for name, (kept_ms, new_ms) in zip(("p50", "p99"), figures, strict=True):
        if abs(kept_ms - new_ms) > within:
            yield f"{client.name}: {name} of kept and new connections are {abs(kept_ms - new_ms):.1f} ms apart"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--within", type=float, default=2.0, help="milliseconds")
    options = parser.parse_args()
    with serving() as server:
        url = f"http://127.0.0.1:{server.port}"
        wrong = [why for client in CLIENTS for why in measured(client, url, options.times, options.within)]
    print("\n".join(wrong) or "all as it should be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
