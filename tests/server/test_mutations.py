"""Damaged requests through the whole application, on two stages: none is a fault, and every refusal has its form.

The same over real sockets, by tens of thousands: ``python -m tests.server.campaigns.mutations``.
"""

import asyncio
import random
from collections.abc import Iterator

import pytest
from asgi import answer
from effort import thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import trouble_with
from mutating import BODIES, WITHOUT_BODY, Asked, mutated, valid
from stages import pipeline

from splitinfer.demo import TARGET
from splitinfer.server.app import make_app
from splitinfer.server.guard import Guard
from splitinfer.server.service import Service

SHORTLY = ("X-Splitinfer-Timeout", "2")  # seconds: a request without its max_tokens ends


@pytest.fixture(scope="module")
def application() -> Iterator[Guard]:
    with pipeline(TARGET, [6, 6]) as llm:
        yield make_app(Service(llm, "demo"))


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
    assert len(BODIES) + len(WITHOUT_BODY) == 15


@settings(max_examples=thorough(400, 4000), derandomize=True)
@given(rng=st.randoms(use_true_random=False))
def test_damaged_requests_are_answered(application: Guard, rng: random.Random):
    asked = mutated(rng)
    assert trouble(application, asked) is None, f"{asked.method} {asked.target:.80}: {asked.what}"
