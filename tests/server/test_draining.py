"""A server that is told to end under load: every answer ends as its API says, whether it was whole or cut short."""

import asyncio
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from campaigns.asking import canaries, known, streams_of, under_load
from campaigns.serving import quick_model
from stages import pipeline

from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service


def test_answers_end_when_the_server_is_told_to(tmp_path: Path):
    with pipeline(quick_model(tmp_path / "quick"), [1, 1], max_running=4) as llm:
        short = known(llm, [replace(each, num_tokens=8) for each in canaries(2, most_words=5)])
        long = [replace(each, num_tokens=3000) for each in canaries(2, most_words=5)]
        asks = [ask for canary in (*short, *long) for ask in streams_of(canary)]
        with closing(Server(Service(llm, "demo"), Listen(port=0))) as server:

            def tell() -> None:
                server.begin_draining()
                threading.Thread(target=llm.drain, args=(0.3,), daemon=True).start()

            found = asyncio.run(under_load(f"http://127.0.0.1:{server.port}", asks, 0.3, tell))
    assert [each for each in found if each.wrong] == []
    assert {each.how for each in found[: len(asks)]} == {"whole", "cut short"}
    assert [each.how for each in found[len(asks) :]] == ["refused"] * 4
