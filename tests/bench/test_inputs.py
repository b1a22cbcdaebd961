"""What a measurement cannot use is said before anything is loaded; and what is asked."""

import pytest
from typer.testing import CliRunner

from splitinfer.bench import speed
from splitinfer.bench.child_process import AskedProcess
from splitinfer.bench.options import Options
from splitinfer.bench.parts import DRAFTS, PROMPT, STREAM, STREAMS, TURN, prompt_part, speed_parts, tasks_of
from splitinfer.cli import app
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM


def test_what_does_not_fit_into_the_context_is_refused(monkeypatch: pytest.MonkeyPatch):
    for one, name in ((LLM, "_open"), (AskedProcess, "__init__")):
        monkeypatch.setattr(one, name, lambda *_: pytest.fail("something is loaded before all inputs are looked at"))
    with pytest.raises(ConfigError, match=r"the tasks need 5,064 tokens, but the model's context is 4,096"):
        speed.measure(Options("demo.yaml", decode_tokens=5000))


def test_a_layout_is_needed():
    done = CliRunner().invoke(app, ["bench"])
    assert (done.exit_code, "--layout" in done.output) == (2, True)


def test_streams_are_a_list():
    assert Options("demo.yaml", streams="8,16,8").counts == (8, 16)
    for wrong in ("", "8,", "0", "many"):
        done = CliRunner().invoke(app, ["bench", "--layout", "demo", "--streams", wrong])
        assert (done.exit_code, "it takes numbers with commas" in done.output) == (2, True)


def test_no_two_trials_have_a_prompt_in_common_and_a_second_turn_follows_its_first():
    parts = speed_parts(16, 200, (2, 4))
    kinds = (STREAM, DRAFTS, STREAMS, STREAMS, PROMPT, TURN)
    assert tuple(part.kind for part in parts) == kinds
    one, other = (tasks_of(parts, 300, None, seed) for seed in (1, 2))
    assert one.prompts == tasks_of(parts, 300, None, 1).prompts
    assert one.prompts["prompt_200"] == one.prompts["turn"] != other.prompts["turn"]
    assert len({*one.batch(parts[2], 0), *one.batch(parts[3], 1), *other.batch(parts[3], 0)}) == 2 + 4 + 4


class Letters:
    """A tokenizer of characters."""

    def encode(self, text: str, adds_special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_long_prompt_begins_otherwise_in_every_trial_and_asks_for_its_number():
    part, other = prompt_part(400), prompt_part(800)
    texts = {}
    for seed in (1, 2):
        tasks = tasks_of([part, other], 300, Letters(), seed)
        for name, tokens in tasks.prompts.items():
            texts[seed, name] = "".join(map(chr, tokens))
            assert texts[seed, name].count(tasks.needles[name]) == 1
    assert sorted(map(len, texts.values())) == [400, 400, 800, 800]
    assert len({text[:45] for text in texts.values()}) == 4


@pytest.mark.parametrize("length", [4, 64, 400])
def test_a_prompt_of_any_length_begins_with_the_number_of_its_trial(length: int):
    """Else it would be answered from the KV of an earlier trial."""
    (one,), (other,) = (tasks_of([prompt_part(length)], 300, Letters(), seed).prompts.values() for seed in (1, 2))
    assert (chr(one[0]), chr(other[0])) == ("1", "2")


def test_no_prompt_is_longer_than_its_part_says():
    parts = speed_parts(8, 40, (2,))
    prompts = tasks_of(parts, 300, Letters(), 1).prompts
    assert {part.name: len(prompts[part.name]) for part in parts} == {part.name: part.prompt for part in parts}
