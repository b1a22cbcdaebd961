"""A full queue over HTTP: 429 in each API's form, with a time that follows from what is under way."""

from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
from campaigns.serving import quick_model
from processes import until
from stages import pipeline

from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

SAID = [{"role": "user", "content": "Once upon a time"}]
LONG = {"messages": SAID, "max_tokens": 3000, "ignore_eos": True, "stream": True}
ASKED = [
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["It rained.", "It snowed."], "max_tokens": 2}),
    ("/v1/responses", {"input": "Once", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 2}),
]
AT_MOST = 60.0


def test_who_is_turned_away_is_told_so_in_the_words_of_its_api_and_when_to_come_again(tmp_path: Path):
    with pipeline(quick_model(tmp_path / "quick"), [1, 1], max_running=1, max_waiting=1) as llm, ExitStack() as stack:
        server = Server(Service(llm, "demo"), Listen(port=0))
        stack.callback(server.close)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=AT_MOST))
        with ExitStack() as under_way:
            running = under_way.enter_context(client.stream("POST", "/v1/chat/completions", json=LONG))
            until(lambda: llm.stats()["running"] == 1, "one is running")
            lines = running.iter_lines()
            next(lines)
            under_way.enter_context(client.stream("POST", "/v1/chat/completions", json=LONG))
            until(lambda: llm.stats()["waiting"] == 1, "one is waiting")
            told = [client.post(path, json=body) for path, body in ASKED]
            assert [answer.status_code for answer in told] == [429] * 4
            times = [int(answer.headers["retry-after"]) for answer in told]
            assert all(1 <= seconds <= 60 for seconds in times)
            assert [answer.json()["error"]["type"] for answer in told] == ["rate_limit_error"] * 4
            assert told[0].json()["error"]["code"] == "queue_full"
            assert told[3].json()["type"] == "error"
            assert "1 requests are waiting already" in told[0].json()["error"]["message"]
            del lines
        until(lambda: server.service.num_running == 0 and not llm.stats()["running"], "all are over")
        assert [client.post(path, json=body).status_code for path, body in (ASKED[0], ASKED[3])] == [200, 200]
        assert llm.stats()["waiting"] == 0
