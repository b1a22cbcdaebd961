"""The promise with drafts: every drafter, however wrong, and every flight give the tokens there are without."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny
from engine import door
from engine.door import SEVERAL, Ask, Guesses, Open, ask, launches_ahead, streams_of
from tiny import Folder

from splitinfer import Flight, SamplingParams
from splitinfer.core import sequence
from splitinfer.core.speculation.speculation import Draft
from splitinfer.engine.drafts.drafters import NGramDrafter
from splitinfer.errors import ModelError
from tests.matrix.configs import configurations

NIGHTLY = pytest.mark.nightly
FLIGHTS = (None, Flight(1), Flight(2, 5, 2), Flight(8, 8, 3))


class Dice(Guesses):
    """Drafts that are right with probability ``right``, and sometimes fewer; each takes ``pause`` seconds."""

    def __init__(self, right: float, streams: Sequence[Sequence[int]], pause: float = 0.0) -> None:
        super().__init__(streams, self._guess_or_miss)
        self._right, self._random, self._pause = right, Random(1), pause

    def _guess_or_miss(self, token: int, _place: int) -> int:
        is_right = self._random.random() < self._right
        return token if is_right else (token + self._random.randrange(1, 90)) % 100

    def drafts(self, seq: sequence.Sequence, count: int) -> Iterator[Draft]:
        for draft in super().drafts(seq, count):
            time.sleep(self._pause)
            yield draft
            if self._random.random() < 0.05:
                return


def with_flight(flight: Flight | None, *asks: Ask) -> list[Ask]:
    return [replace(one, flight=flight) for one in asks]


@pytest.mark.parametrize(("right", "cuts", "options"), [
    (0.0, [1, 3], {}), (0.7, [1, 2, 1], {"fault": launches_ahead(3)}), (1.0, [1, 3], {"micro_batches": 3}),
    pytest.param(0.7, [2, 2], {"scheme": "tcp"}, marks=NIGHTLY), pytest.param(0.7, [4], {}, marks=NIGHTLY),
    pytest.param(0.8, [1, 2, 1], {"block": 8, "kv_bytes": 512 * 80}, marks=NIGHTLY),  # some give up their KV
], ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value))  # fmt: skip
def test_every_flight(
    right: float, cuts: list[int], options: dict[str, Any], tiny_folder: Folder, pipeline: Open
) -> None:
    """Alone and together; log probabilities are the same, too."""
    asks = [*SEVERAL, ask(40, logprobs=3)]
    dice = Dice(right, streams_of(tiny_folder("llama"), asks))
    with pipeline("llama", cuts, drafter=lambda: dice, token_budget=16, **options) as there:
        (plain,) = there.outputs(*with_flight(Flight(), asks[-1]))
        for flight in FLIGHTS:
            (drafted,) = there.outputs(*with_flight(flight, asks[-1]))
            assert drafted.logprobs == plain.logprobs, flight
        counts = there.stats["speculation"]
        assert counts["sent"] > 30
        tried = sum(counts["tried_at"])
        assert counts["accepted"] == tried if right == 1.0 else counts["accepted"] <= 0.9 * tried
        assert right > 0 or counts["accepted"] == 0
        there.answers(*with_flight(FLIGHTS[2], *asks))


@pytest.mark.parametrize(
    "name", ["qwen3_next", *(pytest.param(name, marks=NIGHTLY) for name in ("gemma3_text", "gpt_oss", "qwen3_moe"))]
)
def test_windows_and_states_are_put_back(name: str, tiny_folder: Folder, pipeline: Open) -> None:
    asks = [ask(60, max_tokens=30, temperature=0.8)]  # past the sliding windows
    same = {"token_budget": 64} if name in tiny.SAME_CHUNKS_ONLY else {}
    dice = Dice(0.6, streams_of(tiny_folder(name), asks, **same))
    with pipeline(name, [1, 2, door.num_layers(tiny_folder(name)) - 3], drafter=lambda: dice, token_budget=64) as there:
        for one in asks:
            for flight in (Flight(6), Flight(5, 5, 3)):
                there.answers(*with_flight(flight, one))
        assert there.stats["speculation"]["accepted"] > 20


def test_stop_tokens_strings_and_lengths_inside_a_block(tiny_folder: Folder, pipeline: Open) -> None:
    first = ask(40)
    (right,) = door.alone(tiny_folder("llama"), [first])
    dice = Dice(1.0, streams_of(tiny_folder("llama"), [first]))
    with pipeline("llama", [1, 3], drafter=lambda: dice) as there:
        for at in (i for i in range(1, 6) if right[i] not in right[:i]):
            for params in ({"stop_token_ids": (right[at],)}, {"max_tokens": at + 1}):
                stopped = replace(ask(40, **params), flight=Flight(6, 6, 2))
                assert there.answers(stopped) == [right[: at + 1]]


def test_drafting_ends_when_a_result_says_it_is_no_use(tiny_folder: Folder, pipeline: Open) -> None:
    """Between two guesses the loop listens; a slow drafter that is always wrong does not draft on behind a miss."""
    one = ask(40, max_tokens=12)
    dice = Dice(0.0, streams_of(tiny_folder("llama"), [one]), pause=0.02)
    with pipeline("llama", [1, 3], drafter=lambda: dice) as there:
        there.answers(*with_flight(Flight(1, 16, 2), one))
        assert there.stats["speculation"]["drafted"] < 12 * 10, "sixteen after each miss would be far more"
        assert there.stats["speculation"]["sent"] < 40


@pytest.mark.parametrize(
    "draft", ["demo-draft+ngram", *(pytest.param(name, marks=NIGHTLY) for name in ("demo-draft", "ngram"))]
)
def test_the_demo_pair(draft: str, pipeline: Open) -> None:
    with pipeline("demo", [3, 9], draft=draft) as there:
        tokens = tuple(there.llm.tokenizer.encode("Once upon a time there was a poor woodcutter who"))
        there.answers(Ask(tokens, SamplingParams(20, 0.8, seed=3, ignore_eos=True), flight=Flight(3, 4, 2)))
        counts = there.stats["speculation"]
        assert counts["drafter"] == draft
        assert counts["accepted"] > 0 or draft == "ngram", "nothing repeats in so few tokens"


def test_ngrams_follow_a_text_that_repeats() -> None:
    drafter = NGramDrafter()
    seq = sequence.Sequence(1, [4, 5, 6, 7, 4, 5], SamplingParams(), 0)
    assert [d.token_id for d in drafter.drafts(seq, 4)] == [6, 7, 4, 5]
    seq.drafts.ahead = [6, 9]
    assert [d.token_id for d in drafter.drafts(seq, 4)] == []
    others = [sequence.Sequence(2, [8, 3, 8], SamplingParams(), 0), sequence.Sequence(3, [1, 2], SamplingParams(), 0)]
    rounds = drafter.draft_together([seq, *others], [0, 3, 5])
    assert list(rounds) == [[None, Draft(3), None], [None, Draft(8), None], [None, Draft(3), None]]


def test_a_model_that_cannot_go_back_is_refused_with_its_reason(tmp_path: Path, pipeline: Open) -> None:
    folder = tiny.save(tmp_path / "llama4", "llama", **configurations()["llama4"])
    with pytest.raises(ModelError, match="cannot be rolled back"), pipeline(folder, [1, 7], draft="ngram"):
        pass
