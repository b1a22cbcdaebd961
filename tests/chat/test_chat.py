"""Inputs carried out: with a made-up model for what must happen, with the demo for what really does."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typed_inputs import Script, sampled

from splitinfer.chat.chat import Chat
from splitinfer.chat.commands import COMMANDS
from splitinfer.chat.conversation import Conversation, Turn
from splitinfer.core.layout import Layout, lay_out
from splitinfer.core.sampling_defaults import Recommended, SamplingChoice
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.figures.health import PipelineHealth, StageHealth, StageState
from splitinfer.engine.loop.requests import Reading, RequestOutput, StreamEvent
from splitinfer.errors import PeerError, RequestError
from splitinfer.llm import LLM, Settings
from splitinfer.llm.rebalance import Rebalance
from splitinfer.text.answer import ReasoningPart


class MadeUpRequest:
    def __init__(self, events: list[StreamEvent], num_prompt: int) -> None:
        self._events = events
        self.output = RequestOutput(num_prompt)

    reading = Reading(5, 20, 0, 2.0)

    def watched(self, _every: float | None) -> Iterator[StreamEvent | None]:
        yield None
        while self.output.finish_reason is None:
            event = self._events.pop(0)
            self.output.add(event)
            self.output.reasoning += "".join(part.text for part in event.parts)
            yield event

    def result(self) -> RequestOutput:
        for _ in self.watched(None):
            pass
        return self.output

    def abort(self) -> None:
        self._events[:] = [StreamEvent((), "", 1.0, "abort")]


class MadeUpLLM:
    """Answers "yes it is" in three tokens; a token for each character of a prompt, 100 at most."""

    layout = Layout(lay_out([("a", 1, None)]), model="made up")
    context_length = 100

    def __init__(self) -> None:
        self.settings, self.tokenizer = Settings(), self
        self.prompts: list[str] = []
        self.forgotten = 0
        self.failure: str | None = None
        self.waits_for: str | None = None
        self.state = StageState.READY
        self.gain = 2.0
        self.cuts: list[Layout] = []
        self.brought: str | None = None
        self.aborts_at_once = False
        self.thinks = ""
        self.seeing = SimpleNamespace(read=lambda _path: None)

    def plan(self) -> Rebalance:
        if self.failure:
            raise RequestError(self.failure)
        return Rebalance(self.layout, self.gain, f"{self.gain:g} times as good")

    def follow(self, advice: Rebalance) -> float:
        self.cuts.append(advice.layout)
        self.brought = "it was slower"
        return 1.25

    def outcome(self) -> str | None:
        brought, self.brought = self.brought, None
        return brought

    def encode_chat(self, messages: list[dict[str, str]], *, options: dict[str, Any], mark: str) -> list[int]:
        self.options = options
        return [ord(c) for c in "|".join(m.get("reasoning_content", "") + m["content"] for m in messages)]

    def submit(self, tokens: list[int], params: SamplingParams, *, session: str) -> MadeUpRequest:
        assert session == "chat"
        if len(tokens) >= self.context_length:
            raise RequestError("too long")
        self.prompts.append("".join(map(chr, tokens)))
        self.params = params
        events = [StreamEvent((i,), text, i / 10) for i, text in enumerate(["yes", " it", ""], 1)]
        thought = ReasoningPart(self.thinks)
        events[:0] = [StreamEvent((9,), "", 0.05, parts=(thought,))] if self.thinks else []
        last = StreamEvent((), "", 0.4, "error", error=self.failure) if self.failure else None
        request = MadeUpRequest([*events, last or StreamEvent((4,), " is", 0.4, "stop")], len(tokens))
        if self.aborts_at_once:
            request.abort()
        return request

    def forget(self, session: str) -> None:
        self.forgotten += 1

    def health(self) -> PipelineHealth:
        return PipelineHealth((StageHealth("a", 0, 1, self.state),), self.waits_for)

    def stats(self) -> dict[str, Any]:
        stage = {"name": "a", "busy_seconds": 0.0, "busy_percent": 0.0, "steps": 0, "bytes_sent": 0}
        stage["kv_bytes_per_token"] = 10
        counts = dict.fromkeys(("computed_tokens", "prompt_tokens", "cached_tokens", "generated_tokens"), 0)
        return {"active_seconds": 0.0, "bytes_per_token": 0.0, "finished": {}, "stages": [stage], **counts}


def run(*inputs: str, llm: Any = None, stop_after: int | None = None, max_tokens: int = 10) -> tuple[Chat, Script, int]:
    screen = Script(*inputs, stop_after=stop_after)
    chat = Chat(llm or MadeUpLLM(), sampled(max_tokens=max_tokens), screen)
    return chat, screen, chat.run()


def test_every_command_is_carried_out(tmp_path: Path):
    file = tmp_path / "x.json"
    llm = MadeUpLLM()
    for name in COMMANDS:
        argument = f" {file}" if COMMANDS[name].argument == "FILE" else ""
        chat, screen, code = run("one", f"/{name}{argument}", llm=llm)
        assert (code, chat.has_refused) == (0, False)
        assert screen.said or name in ("quit", "retry", "edit")


def test_the_last_question_is_asked_again_or_offered_for_a_change():
    llm = MadeUpLLM()
    chat, screen, _ = run("one", "two", "/retry", "/edit", "three", llm=llm)
    assert llm.prompts[1] == llm.prompts[2] == "one|yes it is|two"
    assert llm.prompts[3] == "one|yes it is|three"
    assert [each for each in screen.drafts if each] == ["two"]
    assert [turn.user for turn in chat.conversation.turns] == ["one", "three"]
    assert run("/retry")[0].has_refused
    assert run("one", "/reset", "/retry")[1].said[-1] == "there is no question to ask again"


def test_each_question_says_what_it_waits_for():
    llm = MadeUpLLM()
    llm.waits_for, llm.state = "stage a, for up to 60 s", StageState.LOST
    said = run("one", "two", "/layout", llm=llm)[1].said
    assert said[:2] == ["waiting for stage a, for up to 60 s; Ctrl-C gives this question up"] * 2
    assert "state" in said[2]
    assert "lost" in said[2]


def test_another_cut_is_loaded_only_where_that_was_said_and_is_worth_it():
    llm = MadeUpLLM()
    assert run("/plan", llm=llm)[1].said[-1] == "2 times as good"
    assert llm.cuts == []
    assert run("/plan apply", llm=llm)[1].said[-1] == "1 is in force; loading it took 1.2 s"
    assert llm.cuts == [llm.layout]
    llm.gain = 1.01
    assert run("/plan apply", llm=llm)[1].said[-1] == "1.01 times as good"
    assert len(llm.cuts) == 1
    for text, failure in (("/plan", "no step yet"), ("/plan at once", "/plan at once is unknown")):
        llm.failure = "no step yet"
        chat, screen, _ = run(text, llm=llm)
        assert chat.has_refused
        assert failure in screen.said[-1]


def test_turns_go_into_the_next_prompt():
    llm = MadeUpLLM()
    chat, screen, code = run("/system S", "one", "two", "/reset", "three", "/system clear", "four", llm=llm)
    assert llm.prompts == ["S|one", "S|one|yes it is|two", "S|three", "three|yes it is|four"]
    assert screen.answers == ["yes it is"] * 4
    assert (code, chat.has_refused) == (0, False)


def test_a_stopped_answer_is_kept_as_far_as_it_came():
    llm = MadeUpLLM()
    chat, screen, code = run("one", llm=llm, stop_after=2)
    assert chat.conversation.turns == (Turn("one", "yes it"),)
    assert (screen.said, code) == (["[stopped]"], 0)
    run("one", "/retry", llm=llm, stop_after=1)
    assert llm.prompts == ["one"] * 3
    llm.aborts_at_once = True
    chat, screen, _ = run("one", llm=llm)
    assert chat.conversation.turns == ()
    assert "not kept" in screen.said[0]


def test_the_oldest_turns_are_dropped_and_it_is_said():
    llm = MadeUpLLM()
    asked = [f"{i:010}" for i in range(6)]
    _, screen, code = run("/system S", *asked, llm=llm)
    assert code == 0
    assert all(prompt.startswith("S|") and len(prompt) <= 90 for prompt in llm.prompts)
    assert [line for line in screen.said if "dropped" in line] == [
        "the 2 oldest turns were dropped: the conversation no longer fits the 100 tokens of context"
    ]
    few = MadeUpLLM()
    few.context_length = 30
    run(*["0123456789"] * 3, llm=few, max_tokens=5)
    assert all(len(prompt) <= 25 for prompt in few.prompts), "memory was short"


def test_a_text_too_long_changes_nothing():
    llm = MadeUpLLM()
    chat, screen, code = run("one", "x" * 200, "two", llm=llm)
    assert [turn.user for turn in chat.conversation.turns] == ["one", "two"]
    assert (screen.said, code, chat.has_refused) == (["too long"], 0, True)


def test_a_pipeline_that_is_gone_ends_the_chat():
    llm = MadeUpLLM()
    llm.failure = "worker mini is gone"
    _, screen, code = run("one", "two", llm=llm)
    assert (screen.answers, screen.said, code) == (["yes it"], ["worker mini is gone"], 1)

    def refuse(*_args: Any, **_kwargs: Any) -> MadeUpRequest:
        raise PeerError("it was gone before")

    llm.submit = refuse  # type: ignore[method-assign]
    assert run("one", llm=llm)[1].said == ["it was gone before"]


def test_what_a_lost_pipeline_would_take_with_it_is_saved(tmp_path: Path):
    llm = MadeUpLLM()

    class Lost(Script):
        def read(self, draft: str) -> str | None:
            llm.failure = "worker mini is gone" if len(self.answers) == 1 else None
            return super().read(draft)

    screen = Lost("one", "two", "three")
    assert Chat(llm, sampled(max_tokens=10), screen, tmp_path).run() == 1  # type: ignore[arg-type]
    (file,) = tmp_path.iterdir()
    assert screen.said == ["worker mini is gone", f"2 turns saved to {file}; next time, go on with: /load {file}"]
    assert run(f"/load {file}")[0].conversation.turns == (Turn("one", "yes it is"), Turn("two", "yes it"))


def table(said: str) -> list[list[str]]:
    return [line.split(maxsplit=2) for line in said.splitlines()[1:]]


def test_it_is_said_how_far_a_prompt_is_read():
    _, screen, _ = run("Hello")
    assert screen.waits == ["reading 5 of 20, 6 s left"]


def test_settings_are_shown_with_their_origins_set_and_put_back():
    sampling = SamplingChoice({"top_k": 5}, SamplingParams(max_tokens=10)).over(
        Recommended({"temperature": 0.6, "top_k": 20})
    )
    screen = Script("/set", "/set top_p 0.9", "/set max_tokens 7", "/temp 1.5", "/set", "/set top_p default",
                    "/temp default", "/set max_tokens default", "/set")  # fmt: skip
    chat = Chat(MadeUpLLM(), sampling, screen)  # type: ignore[arg-type]
    chat.run()
    before, said, _, warned, changed, _, back, more, after = screen.said
    assert table(before) == [
        ["temperature", "0.6", "generation_config.json"],
        ["top_p", "1", "default"],
        ["top_k", "5", "command line"],
        ["min_p", "0", "default"],
        ["repetition_penalty", "1", "default"],
        ["max_tokens", "10", "command line"],
        ["thinking_budget", "off", "default"],
        ["reasoning", "usual", "default"],
    ]
    assert said == "top_p is 0.9 (set in this chat)"
    assert warned == "the temperature is 1.5 (set in this chat)"
    new = {"temperature": "1.5", "top_p": "0.9", "max_tokens": "7"}
    for line, old in zip(table(changed), table(before), strict=True):
        assert line == ([line[0], new[line[0]], "set in this chat"] if line[0] in new else old)
    assert (back, more) == ("the temperature is 0.6 (generation_config.json)", "max_tokens is 10 (command line)")
    assert (after, chat.sampling.params) == (before, sampling.params)


def test_reasoning_is_shown_kept_beside_the_answer_and_can_be_bounded(tmp_path: Path):
    file, llm = tmp_path / "talk.json", MadeUpLLM()
    llm.thinks = "Hm."
    chat, screen, _ = run("one", "/set thinking_budget 5", "two", f"/save {file}", llm=llm)
    assert (screen.thoughts, screen.answers) == (["Hm.", "Hm."], ["yes it is", "yes it is"])
    assert llm.prompts == ["one", "one|Hm.yes it is|two"]
    assert (llm.params.thinking_budget, llm.options) == (5, {})
    assert json.loads(file.read_text())[1]["reasoning_content"] == "Hm."
    again, _, _ = run(f"/load {file}", "/set reasoning off", "three", llm=llm)
    assert (again.conversation.turns[:2], llm.params.thinking_budget) == (chat.conversation.turns, 0)
    assert llm.options == {"enable_thinking": False}
    _, screen, _ = run("/set reasoning low", "four", "/set thinking_budget default", "/set reasoning default", llm=llm)
    assert llm.options == {"enable_thinking": True, "reasoning_effort": "low"}
    assert screen.said == ["reasoning is low", "thinking_budget is off (default)", "reasoning is as usual"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("/set warmth 3", "unknown setting 'warmth'; known: temperature, top_p, top_k, min_p, repetition_penalty, "
         "max_tokens, thinking_budget, reasoning"),
        ("/set temp 0", "unknown setting 'temp'; did you mean temperature?"),
        ("/set topk 3", "unknown setting 'topk'; did you mean top_k?"),
        ("/set top_k", "/set top_k needs a value after it, or 'default'"),
        ("/set top_k 1.5", "top_k must be a whole number, not '1.5'"),
        ("/set max_tokens 0", "max_tokens must be at least 1, not 0"),
        ("/temp 101", "temperature must be from 0 to 100, not 101.0"),
        ("/temp warm", "temperature must be a number, not 'warm'"),
    ],
)  # fmt: skip
def test_what_set_refuses(text: str, sentence: str):
    chat, screen, _ = run(text)
    assert (screen.said, chat.has_refused) == ([sentence], True)
    assert chat.sampling.params == SamplingParams(max_tokens=10)


def test_save_and_load(tmp_path: Path):
    file = tmp_path / "talk.json"
    llm = MadeUpLLM()
    _, screen, _ = run("/system S", "one", f"/save {file}", f"/save {file}", llm=llm)
    saved = f"1 turn saved to {file}; next time, go on with: /load {file}"
    assert screen.said[-2:] == [saved, f"{file} already exists; choose another name"]
    assert json.loads(file.read_text())[1] == {"role": "user", "content": "one"}
    forgotten = llm.forgotten
    chat, screen, _ = run(f"/load {file}", llm=llm)
    assert chat.conversation == Conversation("S", (Turn("one", "yes it is"),))
    assert llm.forgotten == forgotten + 2  # once for the file, once at the end


def test_a_text_goes_with_the_next_message(tmp_path: Path):
    (tmp_path / "notes").write_text("one\ntwo\n")
    chat, screen, _ = run(f"/read {tmp_path / 'notes'}", "Which?", f"/read {tmp_path}")
    assert [turn.user for turn in chat.conversation.turns] == ["one\ntwo\n\n\nWhich?"]
    assert screen.said[0] == f"{tmp_path / 'notes'} goes with your next message"
    assert "cannot be read: " in screen.said[-1]


def test_files_that_cannot_be_loaded_or_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "latin").write_bytes(b'["\xe9"]')
    (tmp_path / "other").write_text("{}")
    names = ["latin", "other", "none", "."]
    chat, screen, code = run(*(f"/load {tmp_path / name}" for name in names), "/load ~nobody-here/x", "/save /no/where")
    assert [line.partition(": ")[2] for line in screen.said] == [
        "it is not UTF-8 text (byte 2)",
        "it does not contain a list of messages",
        "No such file or directory",
        "it is not a file",
        "Could not determine home directory.",
        "No such file or directory",
    ]
    assert (chat.conversation, chat.has_refused, code) == (Conversation(), True, 0)
    file = tmp_path / "talk.json"
    with monkeypatch.context() as full:
        full.setattr("splitinfer.chat.chat.to_json", lambda _conversation: "one\ud800")
        assert run("one", f"/save {file}")[1].said[-1].startswith(f"{file} cannot be written: ")
    assert run("one", f"/save {file}")[1].said[-1].startswith(f"1 turn saved to {file};"), "no half of it was there"


def test_a_loaded_conversation_goes_on_with_its_kv_after_a_restart(tmp_path: Path):
    """Answers that the tokenizer would cut elsewhere are among them, and nothing of them is computed again."""
    layout = {"model": "demo", "stages": [{"name": "whole", "layers": 12}]}
    file, settings = tmp_path / "talk.json", Settings(kv_dir=tmp_path / "kv")
    sampling = sampled(max_tokens=60, temperature=0.9, seed=11)  # parts from its text's tokens at the 17th
    with LLM(layout, settings=settings) as llm:
        said = Script("Tell me of a wolf and a king", "And then?", f"/save {file}")
        Chat(llm, sampling, said).run()
    messages = json.loads(file.read_text())
    with LLM(layout, settings=settings) as llm:
        assert llm.tokenizer.encode(messages[1]["content"]) != messages[1]["token_ids"]
        Chat(llm, sampling, Script(f"/load {file}", "Who came?")).run()
        stats = llm.stats()
        asked = llm.tokenizer.encode_chat([*messages, {"role": "user", "content": "Who came?"}])
    new = len(asked) - stats["cached_tokens"]
    assert new <= len(llm.tokenizer.encode("Who came?")) + 4
    assert stats["computed_tokens"] < new + sampling.params.max_tokens
