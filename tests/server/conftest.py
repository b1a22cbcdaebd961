"""A quick pipeline of two stages, a server's application in front of it, and clients in memory, once for each file that
asks for them."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
from asgi import InMemory
from campaigns.serving import quick_model
from stages import pipeline

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM
from splitinfer.server.guard import Guard
from splitinfer.server.running import make_app
from splitinfer.server.service import Service


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is given to ``pipeline``. A file that asks another model has its own."""
    return {"model": quick_model(tmp_path_factory.mktemp("quick")), "cuts": [1, 1]}


@pytest.fixture(scope="module")
def llm(served: dict[str, Any]) -> Iterator[LLM]:
    with pipeline(**served) as running:
        running.generate([[1]], SamplingParams(max_tokens=1), grammar={})  # begins what lasts longer than one test
        yield running


@pytest.fixture(scope="module")
def service(llm: LLM) -> Service:
    return Service(llm, "demo")


@pytest.fixture(scope="module")
def application(service: Service) -> Guard:
    return make_app(service)


@pytest.fixture(scope="module")
def http(application: Guard) -> Iterator[httpx.Client]:
    with httpx.Client(transport=InMemory(application), base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def claude(http: httpx.Client) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url="http://localhost", api_key="none", max_retries=0, http_client=http)
