"""Answers by every API, as the official clients read them, are the library's: whole and streamed."""

import json
import re
from itertools import pairwise
from typing import Annotated, Any, Literal

import anthropic
import httpx2 as httpx
import openai
import pytest
from pydantic import BaseModel, Field

from splitinfer.core.sequence import SamplingParams
from splitinfer.demo import TARGET
from splitinfer.llm import LLM
from splitinfer.server.service import Service

ONCE = "Once upon a time"
TALE: Any = [{"role": "user", "content": ONCE}]
GREEDY: Any = {"model": "demo", "temperature": 0}
OPTIONS: Any = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    return {"model": TARGET, "cuts": [6, 6]}


def expected(llm: LLM, prompt: str | None = None, **params: Any) -> str:
    tokens = llm.tokenizer.encode_chat(TALE) if prompt is None else llm.tokenizer.encode(prompt)
    return llm.generate([tokens], SamplingParams(**params))[0].text


# -- chats -----------------------------------------------------------------------------------------


def test_a_stream_of_chunks_is_the_same_answer(client: openai.OpenAI, llm: LLM):
    sampling: Any = {"max_tokens": 10, "temperature": 0.8, "seed": 7, "presence_penalty": 0.5}
    asked = {**OPTIONS, **sampling, "logprobs": True, "top_logprobs": 2}
    chunks = list(client.chat.completions.create(model="demo", messages=TALE, **asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(llm, **sampling)
    tokens = [one for c in chunks if c.choices and c.choices[0].logprobs for one in c.choices[0].logprobs.content or ()]
    assert b"".join(bytes(one.bytes or ()) for one in tokens).decode() == text
    assert chunks[-1].usage.completion_tokens == len(tokens) == 10


def test_a_conversation_sent_back_as_text_is_not_computed_again(client: openai.OpenAI, llm: LLM):
    """The answer is cut into letters, as its tokenizer would never do it."""
    letters = {str(token): 100 for word in ("t", "h", "e") for token in llm.tokenizer.encode(word)[-1:]}
    asked: Any = [{"role": "user", "content": f"{ONCE}!"}]
    sampling: Any = {"model": "demo", "messages": asked, "max_tokens": 30, "seed": 5, "logit_bias": letters}
    chunks = client.chat.completions.create(**sampling, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(llm.tokenizer.encode(said)) < len(said) == 30
    for back, cached in ((said, len(llm.tokenizer.encode_chat(asked)) + 29), (said[:20], None)):
        turn = [*asked, {"role": "assistant", "content": back}, {"role": "user", "content": "And then?"}]
        usage = client.chat.completions.create(model="demo", messages=turn, max_tokens=1).usage
        if cached is None:
            assert usage.prompt_tokens == len(llm.tokenizer.encode_chat(turn)), "an edited one is read anew"
        else:
            assert usage.prompt_tokens_details.cached_tokens == cached


def test_an_answer_goes_on_where_it_ended(client: openai.OpenAI, claude: anthropic.Anthropic, http: httpx.Client):
    whole = client.chat.completions.create(**GREEDY, messages=TALE, max_tokens=16).choices[0].message.content or ""
    begun = client.chat.completions.create(**GREEDY, messages=TALE, max_tokens=9).choices[0].message.content or ""
    turns: Any = [*TALE, {"role": "assistant", "content": begun}]
    goes_on: Any = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(**GREEDY, messages=turns, max_tokens=7, extra_body=goes_on)
    assert begun + str(answer.choices[0].message.content) == whole
    number = answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == number - 1  # type: ignore[union-attr]
    message = claude.messages.create(model="demo", messages=turns, max_tokens=7, extra_body={"temperature": 0})
    assert begun + message.content[0].text == whole  # type: ignore[union-attr]
    assert claude.messages.count_tokens(model="demo", messages=turns).input_tokens == number
    for path, key in (("/tokenize", "count"), ("/apply-template", "prompt")):
        found = http.post(path, json={"messages": turns, "continue_final_message": True}).json()[key]
        assert found == number if key == "count" else str(found).endswith(begun)


class Hero(BaseModel, extra="forbid"):
    kind: Literal["king", "shepherd"]
    age: Annotated[int, Field(ge=1, le=99)]


def test_answers_have_the_form_of_a_model(client: openai.OpenAI, claude: anthropic.Anthropic):
    """By the official clients' own helpers, which send a schema and read the answer by it."""
    sampling: Any = {"model": "demo", "temperature": 1.0}
    chat = client.chat.completions.parse(messages=TALE, response_format=Hero, max_tokens=40, seed=3, **sampling)
    assert isinstance(chat.choices[0].message.parsed, Hero)
    response = client.responses.parse(input="Who?", text_format=Hero, max_output_tokens=40, **sampling)
    assert isinstance(response.output_parsed, Hero)
    any_object: Any = {"response_format": {"type": "json_object"}, "max_tokens": 60, "logit_bias": {"95": 100}}
    plain = client.chat.completions.create(messages=TALE, **any_object, **sampling)
    assert isinstance(json.loads(str(plain.choices[0].message.content)), dict)
    form: Any = {"format": {"type": "json_schema", "schema": Hero.model_json_schema()}}
    said = claude.messages.create(model="demo", max_tokens=40, messages=TALE, output_config=form)
    assert Hero.model_validate_json(said.content[0].text)  # type: ignore[union-attr]


def test_a_model_whose_template_knows_no_tools_calls_them_and_goes_on(client: openai.OpenAI):
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    ping = {"type": "function", "function": {"name": "ping", "parameters": schema}}
    more: Any = {"model": "demo", "tools": [ping], "temperature": 0, "max_tokens": 60}
    (first,) = client.chat.completions.create(messages=TALE, tool_choice="required", **more).choices  # type: ignore[call-overload]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("ping", "{}")
    result = {"role": "tool", "tool_call_id": call.id, "content": "pong"}
    turns: Any = [*TALE, first.message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(messages=turns, **{**more, "max_tokens": 2})
    assert second.usage.prompt_tokens_details.cached_tokens > 0


KIND = {"type": "object", "properties": {"kind": {"enum": ["king"]}}, "required": ["kind"]}
CLOSED = {**KIND, "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"structured_outputs": {"choice": ["a king", "a shepherd"]}}, "a king|a shepherd"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"json": json.dumps(CLOSED)}}, '{"kind":"king"}'),
        ({"structured_outputs": {"grammar": 'start: ("a" | "b") ~ 3'}}, "[ab]{3}"),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 90, "logit_bias": {"95": 100}}, r"\{.*\}"),
        ({"guided_choice": ["x", "yz"], "guided_json": {}, "guided_regex": ""}, "x|yz"),
        ({"guided_json": CLOSED}, '{"kind":"king"}'),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_grammar": 'root ::= digit{2} "."\ndigit ::= [0-9]'}, r"[0-9]{2}\."),
        ({"grammar": r'root ::= ("\u0041" | "\x42" | .) [^\U00000000-\u0063] # of three'}, r"(?s:.)[^\0-c]"),
        ({"json_schema": CLOSED}, '{"kind":"king"}'),
    ],
)
def test_answers_have_the_form_that_other_servers_fields_ask_for(http: httpx.Client, fields: Any, form: str):
    given = {"model": "demo", "max_tokens": 40, **fields}
    said = http.post("/v1/completions", json={**given, "prompt": "Once"}).json()["choices"][0]
    assert (bool(re.fullmatch(form, said["text"])), said["finish_reason"]) == (True, "stop")
    said = http.post("/v1/chat/completions", json={**given, "messages": TALE}).json()["choices"][0]
    assert re.fullmatch(form, said["message"]["content"])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": "array", "uniqueItems": True}}}}, "uniqueItems"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "strict": True, "parameters": {"properties": {"a": {"uniqueItems": True}}}}}]},
         r'cannot be enforced: Unimplemented keys: \["uniqueItems"\]'),
        ({"extra_body": {"grammar": 'root ::= "a'}}, "not GBNF: Unexpected end"),
        ({"extra_body": {"chat_template_kwargs": {"max_length": 10**9}}}, "max_length is not a chat template setting"),
        ({"messages": [{"role": "user", "content": "a b " * 5000}]}, "tokens; at most"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_do_is_a_400_that_says_so(client: openai.OpenAI, asked: Any, words: str):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(**{"model": "demo", "messages": TALE, **asked})
    assert (caught.value.code == "context_length_exceeded") == ("messages" in asked)


def test_tools_that_a_template_cannot_tell_are_a_400_that_says_so(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    short = "{{ raise_exception('too long') if messages[0].content | length > 99 }}{{ messages[0].content }}"
    monkeypatch.setattr(llm.tokenizer._wrapper._tokenizer, "chat_template", short)
    tools: Any = [{"type": "function", "function": {"name": "weather"}}]
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="the model's chat template refuses these messages: too long"):
        client.chat.completions.create(**asked, tools=tools)
    client.chat.completions.create(**asked)


def test_models(client: openai.OpenAI, claude: anthropic.Anthropic, llm: LLM):
    (model,), (same,) = client.models.list().data, claude.models.list().data
    assert (model.id, model.model_extra and model.model_extra["context_length"]) == ("demo", llm.context_length)
    assert (same.id, same.max_input_tokens, same.type) == ("demo", llm.context_length, "model")
    assert client.models.retrieve("demo").id == claude.models.retrieve("demo").display_name == "demo"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here, but 'demo'"):
        client.models.retrieve("other")


# -- completions -----------------------------------------------------------------------------------


def test_several_prompts_are_continued(client: openai.OpenAI, llm: LLM):
    prompts = [ONCE, "The dog"]
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=8, n=2, echo=True)
    first, second = (prompt + expected(llm, prompt, max_tokens=8) for prompt in prompts)
    assert [choice.text for choice in answer.choices] == [first, first, second, second]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(len(llm.tokenizer.encode(prompt)) for prompt in prompts)
    assert answer.usage.completion_tokens == 4 * 8


def test_a_prompt_alone_is_scored_as_the_library_scores_it(client: openai.OpenAI, llm: LLM):
    (output,) = llm.generate([ONCE], SamplingParams(max_tokens=1, prompt_logprobs=1))
    asked: Any = {**GREEDY, "prompt": ONCE, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.completions.create(**asked, extra_body={"prompt_logprobs": 1})
    logprobs = answer.choices[0].logprobs
    assert len((answer.choices[0].model_extra or {})["prompt_logprobs"]) == len(logprobs.tokens or ())
    assert (answer.choices[0].text, "".join(logprobs.tokens or ())) == (ONCE, ONCE)
    assert logprobs.token_logprobs == [None, *(one.logprob for one in output.prompt_logprobs or ())]
    assert answer.usage.completion_tokens == 0
    chunks = client.completions.create(**asked, stream=True)
    assert [choice.text for chunk in chunks for choice in chunk.choices] == [ONCE]


@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_that_was_not_scored_in_time_is_an_error(client: openai.OpenAI, streams: bool):
    asked: Any = {"prompt": ONCE * 40, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": streams}
    with pytest.raises(openai.APIError, match="it timed out before its prompt was scored"):
        list(client.completions.create(**GREEDY, **asked, extra_headers={"X-Splitinfer-Timeout": "0.001"}))


def test_vllms_usage_in_every_chunk(client: openai.OpenAI):
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    streamed: Any = {"max_tokens": 5, "stream": True, "stream_options": options}
    for chunks in (
        client.chat.completions.create(**GREEDY, messages=TALE, **streamed),
        client.completions.create(**GREEDY, prompt=ONCE, **streamed),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert (counts, counts[0] < counts[-1]) == (sorted(counts), True)
    alone = {**streamed, "stream_options": {"continuous_usage_stats": True}}
    assert {chunk.usage for chunk in client.chat.completions.create(**GREEDY, messages=TALE, **alone)} == {None}


def test_one_prompt_that_cannot_be_ends_those_before_it(client: openai.OpenAI, service: Service, llm: LLM):
    def aborted() -> int:
        return int(llm.stats()["finished"].get("abort", 0))

    before = aborted()
    prompts: Any = [llm.tokenizer.encode(ONCE), [99999999]]
    with pytest.raises(openai.BadRequestError, match="token id 99999999 is not in the model's vocabulary"):
        client.completions.create(**GREEDY, prompt=prompts, n=2, max_tokens=3000, extra_body={"ignore_eos": True})
    assert service.num_running == 0
    client.completions.create(**GREEDY, prompt=ONCE, max_tokens=2)  # behind what ended those
    assert aborted() == before + 2


def test_a_stream_says_how_far_a_long_prompt_is_read(client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("splitinfer.server.openai.chat_writer.PROGRESS_EVERY", 0.02)
    text = "".join(f"{n} little birds sat on a wall. " for n in range(65))
    asked: Any = {**GREEDY, "prompt": text, "max_tokens": 1, "stream": True}
    told = [chunk.model_extra for chunk in client.completions.create(**asked, extra_body={"return_progress": True})]
    said = [each["prompt_progress"] for each in told if each and "prompt_progress" in each]
    read = [each["processed"] for each in said]
    assert read == sorted(read)
    assert any(0 < each["processed"] < each["total"] for each in said)
    assert (said[0]["processed"], said[-1]["processed"]) == (said[0]["cache"], said[0]["total"])
    assert {each["total"] for each in said} == {len(llm.tokenizer.encode(text))}
    known = [each for each in said if each["processed"] > each["cache"]]
    between = [pair for pair in pairwise(known) if pair[0]["processed"] == pair[1]["processed"]]
    assert all(before["seconds_left"] >= after["seconds_left"] >= 0 for before, after in between)
    assert not any("prompt_progress" in (chunk.model_extra or {}) for chunk in client.completions.create(**asked))
    for prompt in (text, "x"):  # also where nearly nothing is to be read
        again = client.completions.create(**{**asked, "prompt": prompt}, extra_body={"return_progress": True})
        said = [
            chunk.model_extra["prompt_progress"] for chunk in again if "prompt_progress" in (chunk.model_extra or {})
        ]
        assert [one["processed"] for one in said] == [said[0]["cache"], said[0]["total"]]


def test_the_tokens_of_log_probabilities_are_those_of_the_text(client: openai.OpenAI, llm: LLM):
    """The token that ends an answer is not among them; and each choice has those of an echoed prompt."""
    asked: Any = {"model": "demo", "max_tokens": 5, "logit_bias": {str(*llm.tokenizer.eos_token_ids): 100}}
    chat = client.chat.completions.create(**asked, messages=TALE, logprobs=True).choices[0]
    assert (chat.message.content, chat.finish_reason) == ("", "stop")
    assert chat.logprobs.content == []
    text = client.completions.create(**asked, prompt=ONCE, logprobs=1, n=2, echo=True)
    for choice in text.choices:
        assert "".join(choice.logprobs.tokens or ()) == choice.text == ONCE


def test_which_tools_may_be_called_keeps_the_cache(client: openai.OpenAI):
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[:1]}}
    for choice in ("auto", "none", allowed, "required"):
        asked: Any = {**GREEDY, "messages": TALE, "tools": tools, "tool_choice": choice, "max_tokens": 1}
        usage = client.chat.completions.create(**asked).usage
        if choice != "auto":
            assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


# -- responses -------------------------------------------------------------------------------------


def test_a_stream_of_events_is_the_same_response_and_never_silent(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("splitinfer.server.answer.PING_EVERY", 0.0005)
    stop = expected(llm, max_tokens=25).split()[12]  # so that it ends as completed
    with client.responses.stream(**GREEDY, input=ONCE, extra_body={"stop": [stop]}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert sum(event.type == "response.in_progress" for event in events) > 1
    assert final.output_text == expected(llm, max_tokens=3000, stop=(stop,)) != ""


def test_input_is_counted(client: openai.OpenAI, claude: anthropic.Anthropic, llm: LLM):
    number = len(llm.tokenizer.encode_chat([{"role": "system", "content": "Be kind."}, *TALE]))
    counted = client.responses.input_tokens.count(model="demo", input=ONCE, instructions="Be kind.")
    theirs = claude.messages.count_tokens(model="demo", messages=TALE, system="Be kind.")
    assert (counted.input_tokens, theirs.input_tokens) == (number, number)


# -- messages --------------------------------------------------------------------------------------


def test_a_message_is_the_same_answer_and_its_stop_sequence_is_named(claude: anthropic.Anthropic, llm: LLM):
    text = expected(llm, max_tokens=10)
    asked: Any = {"model": "demo", "max_tokens": 10, "messages": TALE, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**asked)
    assert (message.content[0].text, message.stop_reason) == (text, "max_tokens")  # type: ignore[union-attr]
    assert message.usage.output_tokens == 10
    stop = text.split()[3]
    stopped = claude.messages.create(**asked, stop_sequences=[stop, "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
