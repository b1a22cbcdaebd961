"""A model that can be divided over two ranks is divided, and described; any other says why not in one sentence."""

from typing import Any

import mlx.core as mx
import pytest
import tiny
from tiny import Folder

from splitinfer.errors import ModelError
from splitinfer.models.cut.divided import divide
from splitinfer.models.cut.pretended import PretendedRank, alone
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.layer_kinds import describe, with_half


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("llama", {}, ""),
        ("qwen3_moe", {}, ""),
        ("gemma3_text", {}, ""),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
         "llama cannot be divided by 2 ranks: n_kv_heads of self_attn is 3."),
        ("llama", {"intermediate_size": 95}, "llama cannot be divided by 2 ranks (Cannot shard the output of size 95"),
    ],
)  # fmt: skip
def test_why_not(name: str, changes: dict[str, Any], why: str):
    found = ""
    try:
        divide(tiny.build(name, **changes)[0], PretendedRank())
    except ModelError as error:
        found = str(error)
    assert found.startswith(why), found
    assert not found if not why else found.endswith("Cut it by layers instead, with a stage for each machine.")


def test_what_each_rank_holds(tiny_folder: Folder):
    """The matrices of layers are divided, and keys and values; not the norms, the router, the embedding, the head."""
    checkpoint = open_folder(tiny_folder("qwen3_moe"))
    described = describe(checkpoint, None, "qwen3_moe")
    whole = described.profile
    found = with_half(whole, described)
    half = found.half
    assert half is not None
    norms, router = 4 * (2 * 64 + 2 * 16), 4 * 4 * 64
    for layer, own in zip(whole.layers, half.layers, strict=True):
        assert own.weights == (layer.weights - norms - router) // 2 + norms + router
        assert (2 * own.kv_per_token, own.sums) == (layer.kv_per_token, 2)
    assert (half.embedding, half.head) == (whole.embedding, whole.head)


def test_latent_keys_and_values_are_not_divided(tiny_folder: Folder):
    checkpoint = open_folder(tiny_folder("deepseek_v3"))
    described = describe(checkpoint, None, "deepseek_v3")
    whole, half = described.profile, with_half(described.profile, described).half
    assert half is not None
    assert [own.kv_per_token for own in half.layers] == [layer.kv_per_token for layer in whole.layers]
    assert [own.sums for own in half.layers] == [2] * whole.num_layers


def test_sums_of_real_groups_stay_theirs():
    """A pretended rank concerns the model that it divided, and nothing else in the process."""
    model, _ = tiny.build("llama")
    divide(model, PretendedRank())
    with alone() as sums:
        mx.eval(model(mx.zeros((1, 3), mx.int32)), mx.distributed.all_sum(mx.ones((2,))))
    assert len(sums) == 2 * 4
