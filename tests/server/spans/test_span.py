"""A request's span: its phases, in whatever way it ended, and nothing of what was asked."""

import pytest

from splitinfer.server.spans import Arrival, ChoiceTimes, RequestSpan, Usage, span_of

CAME = Arrival("/v1/chat/completions", "req_1", 10.0, {"traceparent": "00-1-2-01", "cookie": "secret"})
USAGE = Usage(prompt=7, cached=3, generated=5)


def span(*choices: ChoiceTimes, arrival: Arrival = CAME) -> RequestSpan:
    return span_of(arrival, "demo", choices, USAGE, 20.0)


def seconds(made: RequestSpan) -> dict[str, object]:
    return {
        name.removeprefix("splitinfer.").removesuffix("_seconds"): value
        for name, value in made.attributes.items()
        if name.endswith("_seconds")
    }


def test_a_whole_answer():
    made = span(ChoiceTimes(11.0, 13.0, 16.0, 19.5, "stop"))
    assert made.events == (("queued", 11.0), ("prefill", 13.0), ("decode", 16.0))
    assert seconds(made) == {"preparing": 1.0, "queue": 2.0, "prefill": 3.0, "decode": 3.5}
    assert (made.began, made.ended, made.has_failed) == (10.0, 20.0, False)
    assert made.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert made.attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert made.attributes["gen_ai.operation.name"] == "chat"
    assert made.parent == {"traceparent": "00-1-2-01"}, "of the headers only the trace is kept"
    assert "secret" not in str(made)


@pytest.mark.parametrize(
    ("choice", "events", "phases"),
    [
        (ChoiceTimes(11.0), ["queued"], {"preparing": 1.0, "queue": 9.0}),
        (ChoiceTimes(11.0, 13.0), ["queued", "prefill"], {"preparing": 1.0, "queue": 2.0, "prefill": 7.0}),
        (ChoiceTimes(11.0, 13.0, 16.0, 18.0, "abort"), ["queued", "prefill", "decode"],
         {"preparing": 1.0, "queue": 2.0, "prefill": 3.0, "decode": 2.0}),
    ],
)  # fmt: skip
def test_an_answer_that_was_given_up(choice: ChoiceTimes, events: list[str], phases: dict[str, float]):
    made = span(choice)
    assert [name for name, _ in made.events] == [*events, "given up"]
    assert (made.events[-1][1], made.has_failed) == (20.0, False)
    assert seconds(made) == phases
    failed = span(ChoiceTimes(11.0, 13.0, reason="error"))
    assert (failed.has_failed, failed.events[-1]) == (True, ("prefill", 13.0))


def test_phases_of_several_choices_begin_with_the_first():
    made = span(ChoiceTimes(11.0, 14.0, 15.0, 19.0, "stop"), ChoiceTimes(11.0, 12.0, 16.0, 17.0, "length"))
    assert made.events == (("queued", 11.0), ("prefill", 12.0), ("decode", 15.0))
    assert seconds(made)["decode"] == 4.0
    assert made.attributes["gen_ai.request.choice.count"] == 2
