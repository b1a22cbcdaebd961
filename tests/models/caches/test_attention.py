"""What unfused attention takes is counted by numbers worked out by hand, and seen in graphs that nobody computes."""

import threading

import mlx.core as mx
import pytest
from tiny import Folder

from splitinfer.core.kv.format import format_of
from splitinfer.models.caches.attention import Attention, from_config, observed, score_bytes
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.loader import survey

K = 1024


def half(heads: int, query_dim: int, value_dim: int | None = None, window: int | None = None) -> Attention:
    return Attention(heads, query_dim, value_dim or query_dim, 2, window)


@pytest.mark.parametrize(
    ("layers", "backend", "rows", "context", "num_bytes"),
    [
        ([half(32, 128)], "metal", 512, 32 * K, 0),
        ([half(32, 256)], "metal", 512, 32 * K, 2**30),  # 32 heads of 512 rows, each 64 KiB: 32,768 numbers of 2 bytes
        ([half(128, 192, 128)], "metal", 512, 32 * K, 4 * 2**30),
        ([Attention(32, 256, 256, 4)], "metal", 512, 32 * K, 2 * 2**30),
        ([half(24, 256)], "metal", 2048, 32 * K, 3_221_225_472),  # 3.2 GB and 12.9 GB were measured (jundot/omlx #2025)
        ([half(24, 256)], "metal", 2048, 128 * K, 12_884_901_888),
        ([half(32, 128), half(16, 256), half(8, 256)], "metal", 512, 32 * K, 2**29),  # one layer after the other
        ([half(32, 256, window=1024), half(4, 512)], "metal", 512, 32 * K, 2**27),
        ([half(32, 256, window=1024)], "metal", 512, 256, 2**23),
        ([Attention(128, 128, 128, 2, adds_scores=True)], "metal", 512, 32 * K, 4 * 2**30),  # as DeepSeek V3's
        ([Attention(32, 0, 0, 2)], "metal", 512, 32 * K, 2**30),  # computed by the model itself
        ([half(32, 128)], "cuda", 512, 32 * K, 0),
        ([Attention(32, 128, 128, 4)], "cuda", 512, 32 * K, 2 * 2**30),
        ([half(32, 100)], "cuda", 512, 32 * K, 2**30),
        ([half(32, 256)], "cpu", 512, 32 * K, 0),  # as ever
        ([], "metal", 512, 32 * K, 0),
    ],
)
def test_bytes_of_scores(layers: list[Attention], backend: str, rows: int, context: int, num_bytes: int):
    assert score_bytes(layers, backend, rows, context) == num_bytes


def test_a_configuration_stands_in_for_what_is_not_observed():
    assert from_config({"num_attention_heads": 8}, 2) == (Attention(8, 0, 0, 2),)
    assert from_config({"text_config": {"n_head": 12}}, 4) == (Attention(12, 0, 0, 4),)
    assert from_config({}, 2) == from_config({"num_attention_heads": "many"}, 2) == ()


@pytest.mark.parametrize("kv_format", ["exact", "k8v8"])
def test_a_survey_sees_the_attention_of_its_layers(tiny_folder: Folder, kv_format: str):
    folder = tiny_folder("llama", head_dim=64) if kv_format != "exact" else tiny_folder("llama")
    checkpoint = open_folder(folder)
    heads = checkpoint.config["num_attention_heads"]
    head = checkpoint.config.get("head_dim") or checkpoint.config["hidden_size"] // heads
    found = survey(checkpoint, 1, 3, "float32", format_of(kv_format))
    assert found.attention == (Attention(heads, head, head, 4),)


def test_a_model_that_adds_scores_of_its_own_is_seen(tiny_folder: Folder):
    assert [a.adds_scores for a in survey(open_folder(tiny_folder("deepseek_v3")), 0, 2, None).attention] == [True]


def test_a_sliding_window_bounds_the_keys(tiny_folder: Folder):
    found = survey(open_folder(tiny_folder("gemma3_text")), 0, 4, None).attention
    assert {a.window is None for a in found} == {True, False}
    assert all(a.window is None or a.window < 2048 for a in found)


def test_other_threads_are_not_observed_and_mlx_is_as_before():
    original = mx.fast.scaled_dot_product_attention
    x = mx.ones((1, 1, 2, 64))

    shapes: list[tuple[int, ...]] = []

    def call() -> None:
        shapes.append(mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0).shape)

    with observed() as calls:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert shapes == [(1, 1, 2, 64)]
    assert not calls
    assert mx.fast.scaled_dot_product_attention is original
