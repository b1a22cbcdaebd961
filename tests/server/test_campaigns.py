"""A minute's worth of each campaign of the server in a few seconds, over real sockets."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from campaigns.asks import canaries, known, streams_of
from campaigns.drain import under_load, wrong_with
from campaigns.looking import look
from campaigns.serving import left_by, quick_model, settle
from campaigns.storm import Weather, storm
from stages import pipeline

from splitinfer.llm import LLM
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service


@contextmanager
def served(llm: LLM, max_running: int = 1024) -> Iterator[Server]:
    server = Server(Service(llm, "demo", max_running=max_running), Listen(port=0))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with pipeline(quick_model(tmp_path / "quick"), [1, 1], max_running=4) as running:
        yield running


@pytest.mark.nightly
def test_a_storm_changes_no_token_and_leaves_nothing(llm: LLM):
    """There is room for fewer requests than there are clients, so some are turned away, too."""
    weather, said = Weather(), known(llm, canaries(6, most_words=20))
    with served(llm, max_running=6) as server:
        asyncio.run(storm(server.port, range(70), 1, said, 10, weather))
        found = settle(lambda: look(server))
    assert weather.troubles + left_by(found) == []
    came = {what for _, _, what in weather.counts}
    assert {"200", "whole", "gone", "400", "429"} <= came, came
    assert weather.num_compared > 20


def test_answers_end_when_the_server_is_told_to(llm: LLM):
    short = known(llm, [replace(each, num_tokens=8) for each in canaries(2, most_words=5)])
    long = [replace(each, num_tokens=3000) for each in canaries(2, most_words=5)]
    asks = [ask for canary in (*short, *long) for ask in streams_of(canary)]
    with served(llm) as server:

        def tell() -> None:
            server.begin_draining()
            threading.Thread(target=llm.drain, args=(0.3,), daemon=True).start()

        ended, late = asyncio.run(under_load(server.port, asks, 0.3, tell))
    assert wrong_with(ended, late) == []
    assert {each.how for each in ended} == {"whole", "cut short"}
    assert len(late) == 4
