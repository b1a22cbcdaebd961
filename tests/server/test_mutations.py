"""Damaged requests through the whole application, on two stages: none is a fault, and every refusal has its form.

The same over real sockets, by tens of thousands: ``python -m tests.campaigns strangers --only requests``.
"""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgi import answer
from effort import thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import trouble_with, verdict
from mutating import BODIES, WITHOUT_BODY, Asked, mutated, sent, valid
from raw_http import Connection

from splitinfer.llm import LLM
from splitinfer.server.guard import Guard
from splitinfer.server.running import Listen, Server, make_app
from splitinfer.server.service import Service

SHORTLY = ("X-Splitinfer-Timeout", "2")  # seconds: a request without its max_tokens ends


@pytest.fixture(scope="module")
def application(llm: LLM) -> Guard:
    return make_app(Service(llm, "demo"))


def trouble(application: Guard, asked: Asked) -> str | None:
    """What is wrong with the answer to a request, if anything."""
    said = asyncio.run(answer(application, Asked(asked.method, asked.target, (*asked.headers, SHORTLY), asked.body)))
    return trouble_with(said.status, said.headers, said.json, is_anthropic=asked.is_anthropic)


def test_valid_requests_are_answered(application: Guard):
    rng = random.Random(1)
    for _ in range(30):
        asked = valid(rng)
        said = asyncio.run(answer(application, asked))
        assert said.status == (404 if asked.target == "/v1/requests/x" else 200), (asked, said)
    assert len(BODIES) + len(WITHOUT_BODY) == 16


@settings(max_examples=thorough(100, 4000), derandomize=True)
@given(rng=st.randoms(use_true_random=False))
def test_damaged_requests_are_answered(application: Guard, rng: random.Random):
    asked = mutated(rng)
    assert trouble(application, asked) is None, f"{asked.method} {asked.target:.80}: {asked.what}"


def test_damaged_bytes_are_answered_or_the_connection_is_closed(llm: LLM):
    server = Server(Service(llm, "demo"), Listen(port=0))

    def trouble_of(number: int) -> str | None:
        what = sent(random.Random(f"bytes-{number}"))
        with Connection(server.port, 60) as connection:
            wrong = verdict(what, connection.exchange(what.raw, what.num_answers, patience=1.0))
        return None if wrong is None else f"{number}: {wrong}: {what.what}"

    try:
        with ThreadPoolExecutor(24) as threads:
            assert [found for found in threads.map(trouble_of, range(thorough(72, 720))) if found is not None] == []
    finally:
        server.close()
