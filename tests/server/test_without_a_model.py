"""The whole application without a model: what clients are told of failures, and which tokens are counted."""

import asyncio
import json
from typing import Any

import pytest
from asgi import answer
from mutating import Asked
from raw_http import Said

from splitinfer.engine.coordinator.health import PipelineHealth
from splitinfer.errors import WorkerLost
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

ADDRESS = "10.0.0.2:5000"
CHATS = {
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses/input_tokens": {"input": "Hello"},
}


class Model:
    """What of ``LLM`` counting needs."""

    context_length, fingerprint, tokenizer = 100, "0", None

    def __init__(self, failure: str | None = None, error: Exception | None = None) -> None:
        self.failure, self.error = failure, error

    def health(self) -> PipelineHealth:
        return PipelineHealth((), failure=self.failure)

    def render_chat(self, *_given: Any, **_more: Any) -> str:
        return "Hello"

    def encode_chat(self, *_given: Any, **_more: Any) -> list[int]:
        if self.error is not None:
            raise self.error
        return [1] * 5

    def encode_known(self, *_given: Any, **_more: Any) -> tuple[list[int], str]:
        return [*self.encode_chat(), 2, 2], "Hello"  # as another splits an answer


def said(model: Model, path: str) -> Said:
    headers = (("Content-Type", "application/json"),)
    asked = Asked("POST", path, headers, json.dumps({"model": "demo", **CHATS[path]}).encode())
    return asyncio.run(answer(make_app(Service(model, "demo", max_running=1)), asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", CHATS)
def test_a_failure_is_told_without_addresses_and_logged_with_them(path: str, caplog: pytest.LogCaptureFixture):
    lost = WorkerLost(f"worker mini ({ADDRESS}) is gone: it closed the link")
    for failure, told in (
        ("stage mini was lost and did not come back", "stage mini was lost and did not come back"),
        (None, "the server cannot carry this out now; its log says why"),
    ):
        caplog.clear()
        found = said(Model(failure, lost), path)
        assert found.status == 503
        assert found.json["error"]["message"] == told
        assert ADDRESS not in str(found.json)
        assert f"{lost}" in caplog.text


@pytest.mark.parametrize("path", CHATS)
def test_counted_are_the_tokens_that_an_answer_would_begin_with(path: str):
    found = said(Model(), path)
    assert (found.status, found.json["input_tokens"]) == (200, 7)
