"""Fields that no model of a request has: what would change the answer is refused unless it asks for nothing; everything
else is answered, named in a header, and logged once. Through the whole application, without a model."""

import logging
from typing import Any

import pytest
from asgi import told
from stub_model import Model

from splitinfer.server.anthropic.messages import MessageRequest
from splitinfer.server.fields import Fields
from splitinfer.server.guard import Guard
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.completions import CompletionRequest
from splitinfer.server.openai.responses import ResponseRequest
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

HI = [{"role": "user", "content": "Hello"}]
ROUTES: dict[str, tuple[dict[str, Any], type[Fields]]] = {
    "/v1/chat/completions": ({"messages": HI}, ChatRequest),
    "/v1/completions": ({"prompt": "Once"}, CompletionRequest),
    "/v1/responses": ({"input": "Hello"}, ResponseRequest),
    "/v1/messages": ({"messages": HI, "max_tokens": 9}, MessageRequest),
}
IDLE = [  # those of other servers do nothing without a field that is refused, or change no word
    "user", "audio", "function_call", "raw", "safety_identifier", "prompt_cache_key", "service_tier", "prediction",
    "store", "max_tool_calls", "background", "truncation", "context_management", "client_metadata", "cache_control",
    "betas", "n_probs", "mirostat_tau", "dynatemp_exponent", "dry_base", "xtc_threshold", "thinking_forced_open",
    "grammar_lazy", "grammar_triggers", "preserved_tokens", "speculative.n_max", "priority",
    "length_penalty", "penalize_nl", "return_token_ids", "draft_model", "num_ctx",
    "a_field_of_next_year",
]  # fmt: skip
ODD: list[Any] = [None, True, False, 0, -1, 10**400, 0.5, "", "odd", [], ["odd", 1], {}, {"a": {"b": [1]}}]


@pytest.fixture(scope="module")
def application() -> Guard:
    return make_app(Service(Model(), "demo"))  # type: ignore[arg-type]


def ask(application: Guard, route: str, **fields: Any) -> Any:
    """What is said; an answer would begin where the engine's queue turns it away."""
    return told(application, route, {**ROUTES[route][0], **fields})


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_what_changes_no_answer_is_answered_whatever_it_is(application: Guard, route: str, value: Any):
    assert ask(application, route, **dict.fromkeys(IDLE, value)).status == 429


@pytest.mark.parametrize("route", ROUTES)
def test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing(application: Guard, route: str):
    model = ROUTES[route][1]
    for name, one in ((name, one) for name, one in model.refused.items() if name not in model.known):
        for value in (None, *one.neutral):
            said = ask(application, route, **{name: value})
            assert (said.status, "x-splitinfer-ignored" in said.headers) == (429, False), (name, value, said.json)
        said = ask(application, route, **{name: "odd"})
        assert (said.status, said.json["error"]["message"]) == (400, f"{name} is not supported: {one.why}")


def test_their_names_come_back_in_a_header_and_stand_in_the_log_once(caplog: pytest.LogCaptureFixture):
    application, route = make_app(Service(Model(), "demo")), "/v1/chat/completions"  # type: ignore[arg-type]
    caplog.set_level(logging.INFO, "splitinfer.server.guard")
    inside = {"messages": [{**HI[0], "timestamp": 1}], "stream_options": {"include_obfuscation": True}}
    for _ in range(2):
        said = ask(application, route, user="u", temperature=0.5, store=False, **inside)
        assert said.headers["x-splitinfer-ignored"] == "user, store, include_obfuscation, timestamp"
    assert [line for line in caplog.messages if "no effect" in line] == [
        f"requests have the field {name}, which has no effect here"
        for name in ("user", "store", "include_obfuscation", "timestamp")
    ]
    assert "x-splitinfer-ignored" not in ask(application, route, temperature=0.5, user=None).headers
    both = told(application, "/v1/messages/count_tokens", {"messages": HI, "metadata": {}, "stream": True})
    assert (both.status, both.headers["x-splitinfer-ignored"]) == (200, "metadata, stream")


def test_no_name_leaves_the_header_or_makes_it_long(application: Guard, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "splitinfer.server.guard")
    hostile = {"a\r\nSet-Cookie: b=c": 1, "\u043a\u043b\u044e\u0447": 1, "x" * 100_000: 1, "a, b": 1, "": 1}
    said = ask(application, "/v1/messages", **hostile, **{f"field_{i}": i for i in range(5000)})
    names = said.headers["x-splitinfer-ignored"].split(", ")
    assert names[:4] == ["aSet-Cookiebc", "x" * 40, "ab", "field_0"]
    assert (said.status, len(names), "set-cookie" in said.headers) == (429, 32, False)
    assert all("\n" not in line for line in caplog.messages)
