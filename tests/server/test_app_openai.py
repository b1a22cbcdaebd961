"""Completions and responses as OpenAI's client meets them: real sockets, two stages."""

from typing import Any

import openai
import pytest

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM
from splitinfer.server.running import Server
from splitinfer.server.stream import EventStream

TALE = "Once upon a time"
ASKED = [{"role": "user", "content": TALE}]
GREEDY = {"model": "demo", "temperature": 0}


def continued(llm: LLM, *prompts: str, **params: Any) -> list[str]:
    answers = llm.generate([llm.encode(prompt) for prompt in prompts], SamplingParams(**params))
    return [answer.text for answer in answers]


def answered(llm: LLM, **params: Any) -> str:
    return llm.generate([llm.encode_chat(ASKED)], SamplingParams(**params))[0].text


# -- completions -----------------------------------------------------------------------------------


def test_several_prompts_are_continued(client: openai.OpenAI, llm: LLM):
    prompts = [TALE, "The dog"]
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=8, n=2, echo=True)
    expected = [prompt + text for prompt, text in zip(prompts, continued(llm, *prompts, max_tokens=8), strict=True)]
    assert [choice.text for choice in answer.choices] == [expected[0], expected[0], expected[1], expected[1]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(llm.encode(prompt)) for prompt in prompts)
    assert answer.usage.completion_tokens == 4 * 8


def test_a_prompt_alone_is_scored_as_the_library_scores_it(client: openai.OpenAI, llm: LLM):
    (output,) = llm.generate([TALE], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    asked = {"prompt": TALE, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.completions.create(**GREEDY, **asked)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (answer.choices[0].text, "".join(logprobs.tokens or ())) == (TALE, TALE)
    assert logprobs.token_logprobs == [None, *(one.logprob for one in output.prompt_logprobs)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    chunks = client.completions.create(**GREEDY, **asked, stream=True)
    assert [choice.text for chunk in chunks for choice in chunk.choices] == [TALE]


@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_that_was_not_scored_in_time_is_an_error(client: openai.OpenAI, streams: bool):
    asked = {"prompt": TALE * 40, "max_tokens": 0, "echo": True, "logprobs": 1}
    with pytest.raises(openai.APIError, match="it timed out before its prompt was scored"):
        list(
            client.completions.create(
                **GREEDY, **asked, stream=streams, extra_headers={"X-Splitinfer-Timeout": "0.001"}
            )
        )


def test_token_ids_are_continued_in_a_stream(client: openai.OpenAI, llm: LLM):
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            **GREEDY, prompt=llm.encode(TALE), max_tokens=8, logprobs=1, stream=True, stream_options=options
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.text for choice in choices)
    assert [text] == continued(llm, TALE, max_tokens=8)
    tokens = [one for choice in choices if choice.logprobs for one in choice.logprobs.tokens or ()]
    assert ("".join(tokens), len(tokens)) == (text, 8)
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_one_prompt_that_cannot_be_ends_those_before_it(client: openai.OpenAI, server: Server, llm: LLM):
    def aborted() -> int:
        return llm.stats()["finished"].get("abort", 0)

    before = aborted()
    body = {"ignore_eos": True}
    with pytest.raises(openai.BadRequestError, match="token id 99999999 is not in the model's vocabulary"):
        client.completions.create(
            **GREEDY, prompt=[llm.encode(TALE), [99999999]], n=2, max_tokens=3000, extra_body=body
        )
    assert server.service.num_running == 0
    client.completions.create(**GREEDY, prompt=TALE, max_tokens=2)  # behind what ended those
    assert aborted() == before + 2


# -- responses -------------------------------------------------------------------------------------


def test_a_stream_is_the_same_response_and_never_silent(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(EventStream.__init__.__kwdefaults__, "ping_every", 0.0005)
    stop = answered(llm, max_tokens=60).split()[30]  # so that it ends as completed
    body = {"stop": [stop]}
    with client.responses.stream(**GREEDY, input=TALE, extra_body=body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert sum(event.type == "response.in_progress" for event in events) > 1
    assert final.output_text == answered(llm, max_tokens=3000, stop=(stop,)) != ""
    raw = list(client.responses.create(**GREEDY, input=TALE, stream=True, max_output_tokens=5))
    assert (raw[0].type, raw[-1].type) == ("response.created", "response.incomplete")
    assert "".join(one.delta for one in raw if one.type == "response.output_text.delta") == answered(llm, max_tokens=5)


def test_input_is_counted(client: openai.OpenAI, llm: LLM):
    counted = client.responses.input_tokens.count(model="demo", input=TALE, instructions="Be kind.")
    assert counted.input_tokens == len(llm.encode_chat([{"role": "system", "content": "Be kind."}, *ASKED]))
