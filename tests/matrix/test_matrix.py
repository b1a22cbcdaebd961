"""Every architecture of mlx-lm, cut everywhere: right to the last bit, or refused; and the table says so."""

from dataclasses import replace
from importlib.metadata import version

import compare
import configs
import effort
import mlx.core as mx
import pytest
import table

from splitinfer.models.border import Border
from splitinfer.models.cut import StageModel
from splitinfer.models.structure import ModelStructure

CONFIGS = configs.configurations()
KNOWN, ROWS = table.written()
same_release = pytest.mark.skipif(version("mlx-lm") != KNOWN, reason="the table is for another mlx-lm: scripts/matrix")


@pytest.mark.parametrize("name", CONFIGS)
def test_cuts(name: str) -> None:
    finding = compare.examine(CONFIGS[name], effort.thorough(compare.USUAL, compare.ALL))
    if version("mlx-lm") == KNOWN:
        known = table.comparable(ROWS.get(name, ""))
        rows = [table.row(name, finding)]
        if finding.any_chunking and not effort.everything:  # as far as was looked
            rows.append(table.row(name, replace(finding, any_chunking=False)))
        assert known in map(table.comparable, rows), "scripts/matrix --write"


@same_release
def test_no_architecture_is_forgotten() -> None:
    described = {configs.architecture(name) for name in CONFIGS} | set(configs.LEFT_OUT)
    assert described == set(configs.architectures())
    assert list(ROWS) == sorted([*CONFIGS, *configs.LEFT_OUT], key=str.lower), "scripts/matrix --write"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "rwkv7", "kimi_k3", "gemma4_text", "afm7"])
def test_a_wrong_cut_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without one of the numbers that cross, the logits are others."""
    model = compare.build(CONFIGS[name])
    tokens, _ = compare.reference(model)
    straight = compare.run([StageModel(model, 0, len(model.layers))], tokens, compare.CHUNK)
    stages = compare.cut(ModelStructure(model), [len(model.layers) - 1])
    assert compare._equal(compare.run(stages, tokens, compare.CHUNK), straight)
    unpack = Border.unpack
    monkeypatch.setattr(Border, "unpack", lambda border, packed, n: unpack(border, _without_last(packed), n))
    assert not compare._equal(compare.run(stages, tokens, compare.CHUNK), straight)


def _without_last(packed: mx.array) -> mx.array:
    return mx.concatenate([packed[..., :-1], mx.zeros_like(packed[..., -1:])], axis=-1)
