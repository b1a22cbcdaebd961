"""Whole and cut, over rdma on MLX's ring or emulated JACCL: the same tokens and log-probabilities, to the last bit.

Models of many kinds, because each has its own border: what crosses besides the hidden state, and how wide it is.
"""

from pathlib import Path

import compare
import configs
import pytest
from stages import pipeline, prompt

import splitinfer
from tests.emulation.jaccl.world import World

CONFIGS = configs.configurations()
NIGHTLY = [("llama/sliding", "rdma"), ("rwkv7", "rdma"), ("mixtral", "rdma"), ("gemma3_text", "rdma"),
           ("llama/sliding", "jaccl"), ("rwkv7", "jaccl"), ("mixtral", "jaccl"), ("deepseek_v3", "jaccl")]  # fmt: skip
PROMPT = prompt(40, vocab=configs.VOCAB)
PARAMS = splitinfer.SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, seed=3, logprobs=4)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param("deepseek_v3", "rdma", marks=pytest.mark.nightly),
        ("gemma3_text", "jaccl"),
        *(pytest.param(*o, marks=pytest.mark.nightly) for o in NIGHTLY),
    ],
)
def test_split_over_rdma_is_whole(name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.make(tmp_path / "jaccl", num_cables=2)
    for variable, value in world.environment.items() if scheme == "jaccl" else ():
        monkeypatch.setenv(variable, value)
    num_layers = len(compare.save(tmp_path, CONFIGS[name]).layers)
    answers = []
    for cuts in ([num_layers], [num_layers - 1, 1], [1, num_layers - 2, 1]):
        with pipeline(tmp_path, cuts, scheme, token_budget=16) as llm:
            output = llm.generate([PROMPT], PARAMS)[0]
            answers.append((output.token_ids, output.logprobs))
            assert {stage.link_transport.transport for stage in llm.layout.stages[1:]} <= {"rdma"}
    assert len(answers[0][0]) == PARAMS.max_tokens
    assert answers[1] == answers[0] == answers[2]
    assert not any(map(world.overlaps, world.ports))
