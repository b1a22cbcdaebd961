"""Whole and cut, over rdma on MLX's ring or emulated JACCL: the same tokens and log-probabilities, to the last bit.

Models of many kinds, because each has its own border: what crosses besides the hidden state, and how wide it is.
"""

from pathlib import Path
from typing import Any

import compare
import configs
import pytest
from effort import long
from stages import pipeline, prompt

import splitinfer
from transports.emulated_jaccl.world import World
from transports.rdma.link import RdmaLink

CONFIGS = configs.configurations()
MODELS = [long("llama/sliding"), "gemma3_text", long("mixtral"), "deepseek_v3", "rwkv7"]
OVER_JACCL = ["gemma3_text", *(long(name) for name in ("llama/sliding", "mixtral", "deepseek_v3", "rwkv7"))]
PROMPT = prompt(40, vocab=configs.VOCAB)
PARAMS = splitinfer.SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, seed=3, logprobs=4)


@pytest.mark.parametrize("name", MODELS)
def test_split_over_rdma_is_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(name, "rdma", tmp_path, monkeypatch)


@pytest.mark.parametrize("name", OVER_JACCL)
def test_split_over_emulated_jaccl_is_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.make(tmp_path / "jaccl", num_cables=2)
    for variable, value in world.environment.items():
        monkeypatch.setenv(variable, value)
    _check(name, "jaccl", tmp_path, monkeypatch)
    assert not any(map(world.overlaps, world.ports))


def _check(name: str, scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_layers = len(compare.save(folder, CONFIGS[name]).layers)
    answers = []
    linked = [0]
    make = RdmaLink.__init__

    def count(link: RdmaLink, *args: Any) -> None:
        linked[-1] += 1
        make(link, *args)

    monkeypatch.setattr(RdmaLink, "__init__", count)
    for cuts in ([num_layers], [num_layers - 1, 1], [1, num_layers - 2, 1]):
        with pipeline(folder, cuts, scheme, token_budget=16) as llm:
            output = llm.generate([PROMPT], PARAMS)[0]
            answers.append((output.token_ids, output.logprobs))
        linked.append(0)
    assert linked == [0, 2, 4, 0], "both ends of every link with hidden states carry over rdma"
    assert len(answers[0][0]) == PARAMS.max_tokens
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
