"""A head in float32: logits as if the last layer's rows were given to the norm and the head in float32, and nothing
else changes."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx.utils import tree_map
from stages import pipeline, prompt

from splitinfer.core.sequence import SamplingParams
from splitinfer.models.caches.caches import arrays_of
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.folder.hub import open_model
from splitinfer.models.load.loader import survey

IDS = mx.array([[5, 9, 2, 30, 7, 7, 1]])


def half_model(name: str, bits: int | None = None) -> nn.Module:
    model, _ = tiny.build(name)
    model.update(tree_map(lambda a: a.astype(mx.bfloat16), model.parameters()))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    return model


def run(model: nn.Module, *, float32_head: bool) -> tuple[mx.array, list[mx.array]]:
    stage = StageModel(model, 0, len(model.layers))
    if float32_head:
        stage.use_float32_head()
    caches = stage.make_caches()
    return stage(IDS, caches, None, IDS.shape[1])[0], [a for one in caches.own for a in arrays_of(one)]


def by_hand(model: nn.Module) -> mx.array:
    """Norm and head in float32, of the last layer's rows in bfloat16."""
    rows: list[mx.array] = []
    norm = model.model.norm
    model.model.norm = lambda x: rows.append(x) or norm(x)
    model(IDS)
    model.model.norm = norm
    x = mx.fast.rms_norm(rows[0][0].astype(mx.float32), norm.weight.astype(mx.float32), norm.eps)
    head = model.lm_head if "lm_head" in model else model.model.embed_tokens
    if "scales" in head:
        scales, biases = head.scales.astype(mx.float32), head.biases.astype(mx.float32)
        weight = mx.dequantize(head.weight, scales, biases, group_size=head.group_size, bits=head.bits)
    else:
        weight = head.weight.astype(mx.float32)
    return x @ weight.T


@pytest.mark.parametrize(("name", "bits"), [("llama", None), ("qwen3", 4)],
                         ids=["head", "tied, of 4 bits"])  # fmt: skip
def test_norm_and_head_are_in_float32(name: str, bits: int | None):
    model = half_model(name, bits)
    logits, kv = run(model, float32_head=True)
    plain, plain_kv = run(model, float32_head=False)
    assert (logits.dtype, plain.dtype) == (mx.float32, mx.bfloat16)
    expected = by_hand(model)
    scale = mx.abs(expected).max().item()
    assert mx.abs(logits - expected).max().item() <= 1e-5 * scale
    assert mx.abs(plain - expected).max().item() > 1e-3 * scale, "in bfloat16 it would be seen"
    assert all(mx.array_equal(a, b) for a, b in zip(kv, plain_kv, strict=True)), "KV is the same"
    assert model(IDS).dtype == mx.bfloat16, "only stages have it"


def test_every_road_gives_the_same(tmp_path: Path):
    """Over one stage and two, and in the layout as in the settings; its log probabilities are finer."""
    folder = tiny.save(tmp_path / "tiny", "llama", dtype=mx.bfloat16)
    params = SamplingParams(8, ignore_eos=True, logprobs=2)
    found = []
    for cuts, on in (([4], True), ([2, 2], True), ([2, 2], False)):
        with pipeline(folder, cuts, dtype="bfloat16", float32_head=on) as llm:
            assert llm.layout.float32_head is on
            (output,) = llm.generate([prompt(9)], params)
            found.append((output.token_ids, output.logprobs))
    assert found[0] == found[1] != found[2]


def test_what_a_step_copies_is_needed(tmp_path: Path):
    """A dense head in half precision is copied in float32; neither a float32 one nor one in few bits is."""
    sizes = {}
    for name, options in {"half": {"dtype": mx.bfloat16}, "single": {}, "bits": {"bits": 4}}.items():
        found = survey(open_model(str(tiny.save(tmp_path / name, "llama", **options))), 2, 4, None)
        sizes[name] = found.with_float32_head().need.weights - found.need.weights
    assert sizes == {"half": 4 * 160 * 64, "single": 0, "bits": 0}
