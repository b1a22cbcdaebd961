"""A full queue: 429 in each API's form, with a time that follows from what is under way."""

from pathlib import Path

from asgi import Client, answer, in_loop, posted, until
from campaigns.serving import quick_model
from stages import pipeline

from splitinfer.server.running import make_app
from splitinfer.server.service import Service

SAID = [{"role": "user", "content": "Once upon a time"}]
LONG = {"messages": SAID, "max_tokens": 3000, "ignore_eos": True, "stream": True}
ASKED = [
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["It rained.", "It snowed."], "max_tokens": 2}),
    ("/v1/responses", {"input": "Once", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 2}),
]


@in_loop
async def test_who_is_turned_away_is_told_so_in_the_words_of_its_api_and_when_to_come_again(tmp_path: Path):
    with pipeline(quick_model(tmp_path / "quick"), [1, 1], max_running=1, max_waiting=1) as llm:
        service = Service(llm, "demo")
        application = make_app(service)
        running = Client(application, posted("/v1/chat/completions", LONG))
        await running.part()
        await until(lambda: llm.stats()["running"] == 1)  # the first part of a stream may come before
        waiting = Client(application, posted("/v1/chat/completions", LONG))
        await until(lambda: llm.stats()["waiting"] == 1)
        told = [await answer(application, posted(path, body)) for path, body in ASKED]
        assert [said.status for said in told] == [429] * 4
        assert all(1 <= int(said.headers["retry-after"]) <= 60 for said in told)
        assert [said.json["error"]["type"] for said in told] == ["rate_limit_error"] * 4
        assert (told[0].json["error"]["code"], told[3].json["type"]) == ("queue_full", "error")
        assert "1 requests are waiting already" in told[0].json["error"]["message"]
        for client in (running, waiting):
            await client.leave()
        assert service.num_running == 0
        await until(lambda: not llm.stats()["running"])
        again = [await answer(application, posted(path, body)) for path, body in (ASKED[0], ASKED[3])]
        assert [said.status for said in again] == [200, 200]
