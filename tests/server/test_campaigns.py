"""A minute's worth of the campaign `soak` in a few seconds, over real sockets."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
from asks import Ask, Canary, asks_of, canaries, known, streamed, streams_of, text_of_events
from campaigns.serving import left_by, quick_model, settle
from client import Connection, request
from draining import under_load
from draining import wrong_with as wrong_at_the_end
from looking import look
from stages import pipeline
from storm import Weather, storm

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
    asks = [streamed(asks_of(canary)[0]) for canary in islice(cycle([each for each in said if each.chat]), 40)]
    firsts, texts = list[int](), dict[int, str]()

    async def read(number: int, ask: Ask, connection: Connection) -> None:
        texts[number] = ""
        async for event in connection.events(await connection.head()):
            texts[number] += text_of_events(ask.api, [event])
            firsts.extend([number] if texts[number] and number not in firsts else [])
        connection.close()

    async def open_all(port: int) -> None:
        reading = []
        for number, ask in enumerate(asks):
            connection = await Connection(port).__aenter__()
            await connection.send(request("POST", ask.path, ask.body))
            await connection.read()  # its head: the engine has it now, and not later than the next
            reading.append(asyncio.create_task(read(number, ask, connection)))
        await asyncio.gather(*reading)

    with served(llm) as server:
        asyncio.run(open_all(server.port))
        found = settle(lambda: look(server))
    assert left_by(found) == []
    assert texts == {number: ask.expected for number, ask in enumerate(asks)}
    assert max(place - number for place, number in enumerate(firsts)) <= 8, firsts  # four decode at a time


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
