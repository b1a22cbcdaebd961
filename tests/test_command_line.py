"""What the command line takes from the model, and what it prints without one."""

from typing import Any

import pytest

from splitinfer.cli import pipeline
from splitinfer.core.sampling_defaults import NOTHING, Recommended, ResolvedSampling
from splitinfer.core.sequence import SamplingParams


class MadeUpLLM:
    recommended_sampling = Recommended({"temperature": 0.6, "top_p": 0.9})

    def __enter__(self) -> "MadeUpLLM":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parameters that answers and chats got."""
    found: list[Any] = []

    def answer(_llm: Any, _text: str, params: SamplingParams, **_: Any) -> int:
        found.append(params)
        return 0

    def run_chat(_llm: Any, sampling: ResolvedSampling) -> int:
        found.append(sampling.params)
        return 0

    monkeypatch.setattr("splitinfer.cli.answer.answer", answer)
    monkeypatch.setattr("splitinfer.chat.run_chat", run_chat)
    monkeypatch.setattr("splitinfer.cli.progress.open_llm", lambda *_: MadeUpLLM())
    monkeypatch.setattr(pipeline, "set_up", lambda _verbose: None)
    monkeypatch.setattr(pipeline, "settings_of", lambda _options: None)
    monkeypatch.setattr(pipeline, "finish", lambda run, _verbose: run())
    return found


@pytest.mark.parametrize("command", [["coord", "--prompt", "hi"], ["coord", "--chat"], ["chat"]])
def test_the_model_decides_where_nothing_is_said(command: list[str], asked: list[SamplingParams]):
    run(*command)
    run(*command, "--temp", "0", "--top-k", "3")
    assert [(p.temperature, p.top_p, p.top_k) for p in asked] == [(0.6, 0.9, 0), (0.0, 0.9, 3)]


def test_a_raw_prompt_is_greedy_unless_something_is_said(asked: list[SamplingParams]):
    run("coord", "--prompt", "hi", "--raw")
    run("coord", "--prompt", "hi", "--raw", "--top-p", "0.5")
    assert asked == [SamplingParams(), SamplingParams(top_p=0.5)]


def test_commands_keep_their_defaults_where_the_model_says_nothing(
    asked: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(MadeUpLLM, "recommended_sampling", NOTHING)
    run("coord", "--chat")
    run("chat")
    assert [p.temperature for p in asked] == [0.0, 0.7]


def run(*args: str) -> None:
    from typer.testing import CliRunner

    from splitinfer.cli import app

    done = CliRunner().invoke(app, [args[0], "--layout", "demo", *args[1:]], catch_exceptions=False)
    assert done.exit_code == 0, done.output
