"""What clients are told: the same sentence in either API's form."""

import logging

import pytest
from asgi import told

from splitinfer.errors import ContextExceeded, Draining, ModelError, NotInstalled, PeerError, RequestError, WorkerLost
from splitinfer.server.gate import Gate, Sessions
from splitinfer.server.guard import Guard
from splitinfer.server.problem import Problem, problem_of


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (415, "invalid_request_error", "invalid_request_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_each_api_has_its_own_kinds(status: int, openai: str, anthropic: str):
    problem = Problem(status, "No.", param="top_p", code="word")
    assert problem.openai() == {"error": {"message": "No.", "type": openai, "param": "top_p", "code": "word"}}
    expected = {"type": "error", "error": {"type": anthropic, "message": "No."}, "request_id": "req_1"}
    assert problem.anthropic("req_1") == expected


@pytest.mark.parametrize(
    ("error", "failure", "status", "sentence"),
    [
        (RequestError("the prompt is empty"), "the pipeline has failed", 400, "the prompt is empty"),
        (NotInstalled("install it"), "the pipeline has failed", 501, "install it"),
        (PeerError("lost"), "the pipeline has failed", 503, "the pipeline has failed"),
        (WorkerLost("worker mini (10.0.0.2:5000) is gone"), None, 503, "its log says why"),
        (ModelError("/home/me/model holds no tokenizer"), None, 503, "its log says why"),
        (ContextExceeded("the prompt has 9 tokens"), None, 400, "the prompt has 9 tokens"),
        (Draining("the coordinator is shutting down"), None, 503, "the server was told to end"),
    ],
)
def test_errors_of_the_library(error: Exception, failure: str | None, status: int, sentence: str):
    """What failed here is said without its text, which has addresses and paths in it."""
    problem = problem_of(error, failure=failure)
    assert problem.status == status
    assert sentence in str(problem)
    assert str(problem) == f"{error}" or f"{error}" not in str(problem)


def test_a_pipeline_that_ends_may_be_there_again_soon():
    """A request is tokenized while SIGTERM comes. A model that has no tokenizer will have none later."""
    assert problem_of(Draining("the coordinator is shutting down")).headers == {"Retry-After": "10"}
    for seconds, wait in ((0.2, "1"), (1.2, "2")):
        assert Problem(429, "No.", retry_after=seconds).headers == {"Retry-After": wait}, "whole, and never 0"
    assert problem_of(ModelError("it has no tokenizer")).headers == {}
    assert Problem(401, "A key is needed.").headers == {"WWW-Authenticate": "Bearer"}


def test_a_prompt_that_is_too_long_is_said_so_that_clients_shorten_it():
    problem = problem_of(ContextExceeded("the prompt has 9 tokens, but the context is 8"))
    assert problem.openai()["error"]["code"] == "context_length_exceeded"
    said = problem.anthropic()["error"]["message"]
    assert said == "prompt is too long: the prompt has 9 tokens, but the context is 8"


def test_what_quotes_a_request_is_no_longer_than_it():
    problem = Problem(400, "no " + "a" * 100_000, param="b" * 100_000)
    assert len(str(problem.openai())) < 1500
    assert len(str(problem.anthropic())) < 1500


def test_a_request_between_the_servers_end_and_the_pipelines_is_refused_and_not_logged_as_failed(
    caplog: pytest.LogCaptureFixture,
):
    async def refused(*_: object) -> None:
        raise Draining("the coordinator is shutting down and takes no new requests")

    said = told(Guard(refused, Gate(), Sessions()), "/v1/models")
    assert (said.status, said.headers["retry-after"]) == (503, "10")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
