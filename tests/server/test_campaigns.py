"""A minute's worth of each campaign in a few seconds: real sockets, and a worker that is a process where one dies."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from campaigns.asks import Canary, canaries, known, streams_of
from campaigns.drain import under_load
from campaigns.drain import wrong_with as wrong_at_the_end
from campaigns.kills import trial, wrong_with
from campaigns.looking import look
from campaigns.open_streams import Crowd, asks_for, open_all
from campaigns.serving import left_by, quick_model, restarted_worker, settle
from campaigns.storm import Weather, storm
from stages import layout, pipeline

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


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_model(tmp_path_factory.mktemp("campaigns") / "quick")


@pytest.fixture(scope="module")
def llm(quick: Path) -> Iterator[LLM]:
    with pipeline(quick, [1, 1], max_running=4) as running:
        yield running


@pytest.fixture(scope="module")
def said(llm: LLM) -> list[Canary]:
    return known(llm, canaries(6, most_words=20))


@pytest.mark.nightly
def test_a_storm_changes_no_token_and_leaves_nothing(llm: LLM, said: list[Canary]):
    """There is room for fewer requests than there are clients, so some are turned away, too."""
    weather = Weather()
    with served(llm, max_running=6) as server:
        asyncio.run(storm(server.port, range(70), 1, said, 10, weather))
        found = settle(lambda: look(server))
    assert weather.troubles + left_by(found) == []
    came = {what for _, _, what in weather.counts}
    assert {"200", "whole", "gone", "400", "429"} <= came, came
    assert weather.num_compared > 20


@pytest.mark.nightly
def test_streams_beyond_those_that_decode_wait_in_order(llm: LLM, said: list[Canary]):
    crowd, long_enough = Crowd(), [each for each in said if each.chat]
    with served(llm) as server:
        asyncio.run(open_all(server.port, asks_for(long_enough, 40), crowd))
        found = settle(lambda: look(server))
    crowd.check(max_running=4)
    assert crowd.troubles + left_by(found) == []
    assert len(crowd.firsts) == 40


def test_answers_end_when_the_server_is_told_to(quick: Path):
    with pipeline(quick, [1, 1], max_running=4) as llm:
        short = known(llm, [replace(each, num_tokens=8) for each in canaries(2, most_words=5)])
        long = [replace(each, num_tokens=3000) for each in canaries(2, most_words=5)]
        asks = [ask for canary in (*short, *long) for ask in streams_of(canary)]
        with served(llm) as server:

            def tell() -> None:
                server.begin_draining()
                threading.Thread(target=llm.drain, args=(0.3,), daemon=True).start()

            ended, late = asyncio.run(under_load(server.port, asks, 0.3, tell))
    assert wrong_at_the_end(ended, late) == []
    assert {each.how for each in ended} == {"whole", "cut short"}
    assert len(late) == 4


@pytest.mark.long  # cluster/test_serve.py kills one in the usual run
def test_a_killed_worker_changes_no_text(quick: Path):
    with restarted_worker() as worker, LLM(layout(quick, [1, 1], [worker.address])) as llm:
        said = known(llm, [replace(each, num_tokens=60) for each in canaries(2, most_words=5)])
        asks = [ask for canary in said for ask in streams_of(canary)]
        with served(llm) as server:
            reads = asyncio.run(trial(server.port, worker, asks, 0.3, away=0.0))
            found = settle(lambda: look(server))
        assert llm.stats()["rejoins"] == 1
    assert wrong_with(reads) + left_by(found) == []
