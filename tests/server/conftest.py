"""A pipeline of two stages, a server in front of it and the official client, once for each file that asks for them."""

from collections.abc import Iterator

import openai
import pytest
from stages import pipeline

from splitinfer.core.sequence import SamplingParams
from splitinfer.demo import TARGET
from splitinfer.llm import LLM
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pipeline(TARGET, [6, 6]) as running:
        running.generate([[1]], SamplingParams(max_tokens=1), grammar={})  # begins what lasts longer than one test
        yield running


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    server = Server(Service(llm, "demo"), Listen(port=0))
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        yield made  # one that is left to the garbage collector leaves it an open socket
