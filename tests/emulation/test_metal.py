"""The table of kernels is what MLX's source gives for these shapes; layers round by kernel, and by that alone."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.emulation.metal import CHIPS, attention, dense, experts, quantised
from tests.emulation.rounding import RowNoise

PAGE = Path(__file__).parents[2] / "docs" / "understand" / "exactness.md"
MODELS = {  # hidden size, query heads, KV heads, head size, of their config.json
    "Llama-3.3-70B": (8192, 64, 8, 128), "Qwen3-8B": (4096, 32, 8, 128), "Qwen3-32B": (5120, 64, 8, 128),
    "Qwen3-30B-A3B": (2048, 32, 4, 128), "Qwen3-235B-A22B": (4096, 64, 4, 128), "Qwen3.5-27B": (5120, 24, 4, 256),
    "gpt-oss-120b": (2880, 64, 8, 64), "GLM-4.5-Air": (4096, 96, 8, 128), "Gemma-3-27B": (5376, 32, 16, 128),
    "Mistral-Small-24B": (5120, 32, 8, 128),
}  # fmt: skip
SHOWN = ("M1", "M4 Max", "M3 Ultra", "M5 Max")


def changes(kernel: Callable[[int], str]) -> str:
    """The numbers of rows at which another kernel computes."""
    return ", ".join(str(rows) for rows in range(2, 129) if kernel(rows) != kernel(rows - 1))


def row(model: str) -> str:
    hidden, heads, kv_heads, dim = MODELS[model]
    cells = [changes(lambda rows, chip=CHIPS[chip]: quantised(chip, rows, hidden, heads * dim)) for chip in SHOWN]
    cells.append(changes(lambda rows: attention(CHIPS["M4 Max"], rows, 2048, dim, heads // kv_heads)))
    return f"| {model} | {' | '.join(cells)} |"


def test_the_table_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert f"| model | {' | '.join(f'4 bits, {chip}' for chip in SHOWN)} | attention, M4 Max |" in page
    assert [row(model) for model in MODELS if row(model) not in page] == []


def test_a_head_in_bfloat16():
    assert changes(lambda rows: dense(CHIPS["M4 Max"], rows, 4096, 151936)) == "2, 6, 16"
    assert changes(lambda rows: dense(CHIPS["M1"], rows, 4096, 151936)) == "2"
    assert changes(lambda rows: dense(CHIPS["M5 Max"], rows, 4096, 151936)) == "2, 6, 16, 65"


def test_experts_share_a_product_where_many_are_sorted():
    of_30b = [experts(8 * rows, 128, is_sorted=rows >= 8, is_quantised=True) for rows in (1, 8, 63, 64)]
    assert of_30b == ["gathered", "gathered", "gathered", "sorted"]
    assert experts(64, 128, is_sorted=True, is_quantised=False) == "sorted"


@pytest.mark.parametrize(("chip", "alike"), [("M1", 5), ("M4 Max", 1), ("M5 Max", 1)])
def test_rows_round_alike_while_their_kernel_is_the_same(chip: str, alike: int, monkeypatch: pytest.MonkeyPatch):
    layer = nn.QuantizedLinear(5120, 64, bias=False)
    layer.scales = mx.ones_like(layer.scales)
    x = mx.random.normal((16, 5120), key=mx.random.key(0))
    RowNoise(1e-3, chip=CHIPS[chip]).install(monkeypatch.setattr)
    first = layer(x[:1])[0]
    same = [rows for rows in range(1, 17) if mx.allclose(layer(x[:rows])[0], first, rtol=1e-5).item()]
    assert same == list(range(1, alike + 1))
