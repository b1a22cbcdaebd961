"""How large the models of ``scripts/on_gpu`` are. Pure.

``full`` is for a card of 80 GB or more: the largest model, 80 layers in bfloat16, takes 45 GB. ``small`` takes the CPU
backend a few minutes, which shows that everything runs, and nothing about a GPU. ``tiny`` is for tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Sizes = Mapping[str, Any]  # of a random model: ``bench.shared.random_model.Shape``


@dataclass(frozen=True, slots=True)
class Size:
    """Of each part.

    architectures, support_dtypes: names to survey (none: all that tests/matrix describes), and what they compute in.
    launch, launch_layers, steps: a model, numbers of its first layers, and steps that are timed.
    folder: a model on two stages; ``streams``, ``stream_tokens``: sequences for each, and tokens of each.
    rows, sequences, row_steps: models by name, rows of a step, and steps.
    exact_folder, exact, kv: a model, and words of a command line.
    send, send_rows: a model, and rows of a step.
    demo: words of ``scripts/train_demo_model``.
    """

    architectures: Sequence[str]
    support_dtypes: Sequence[str]
    launch: Sizes
    launch_layers: Sequence[int]
    steps: int
    folder: Sizes
    streams: int
    stream_tokens: int
    rows: Mapping[str, Sizes]
    sequences: Sequence[int]
    row_steps: int
    exact_folder: Sizes
    exact: Sequence[str]
    kv: Sequence[str]
    send: Sizes
    send_rows: int
    demo: Sequence[str]


def _model(layers: int, hidden: int, mlp: int, vocab: int, **more: Any) -> dict[str, Any]:
    heads = max(2, hidden // 128)
    return {
        "architecture": "qwen3", "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": max(1, heads // 4),
        "mlp": mlp, "vocab": vocab, "dtype": "bfloat16", **more,
    }  # fmt: skip


def _rows(layers: int, hidden: int, mlp: int, vocab: int, experts: int, expert_mlp: int) -> dict[str, Sizes]:
    dense = _model(layers, hidden, mlp, vocab)
    sparse = _model(layers, hidden, expert_mlp, vocab, experts=experts, experts_per_token=max(2, experts // 8))
    return {
        "dense, bfloat16": dense,
        "dense, 4-bit": {**dense, "bits": 4},
        "experts, bfloat16": sparse,
        "experts, 4-bit": {**sparse, "bits": 4},
    }


_DEMO = "--layers 16 --hidden 384 --ffn 1024 --heads 6 --kv-heads 2 --draft-layers 2 --batch 32"

SIZES: Mapping[str, Size] = {
    "full": Size(
        architectures=(), support_dtypes=("float32", "bfloat16"),
        launch=_model(80, 5120, 13824, 32000), launch_layers=(10, 40, 80), steps=40,
        folder=_model(40, 2048, 5632, 8192, bits=4), streams=8, stream_tokens=128,
        rows=_rows(40, 2048, 5632, 8192, 64, 768), sequences=(2, 4, 8, 16, 32), row_steps=16,
        exact_folder=_model(40, 2048, 5632, 8192),
        exact=("--trials", "4", "--prompt-tokens", "1024", "--decode-tokens", "256"),
        kv=("--trials", "3", "--prompt-tokens", "4096", "--decode-tokens", "64"),
        send=_model(40, 4096, 11008, 32000), send_rows=8,
        demo=_DEMO.split(),
    ),
    "small": Size(
        architectures=(), support_dtypes=("float32",),
        launch=_model(8, 128, 384, 512), launch_layers=(1, 4, 8), steps=12,
        folder=_model(4, 128, 384, 512, dtype="float32"), streams=4, stream_tokens=24,
        rows=_rows(4, 128, 384, 512, 8, 64), sequences=(2, 8), row_steps=4,
        exact_folder=_model(4, 128, 384, 512, dtype="float32"),
        exact=("--trials", "1", "--prompt-tokens", "48", "--decode-tokens", "8"),
        kv=("--trials", "2", "--prompt-tokens", "64", "--decode-tokens", "16"),
        send=_model(8, 128, 384, 512), send_rows=4,
        demo=(),
    ),
    "tiny": Size(
        architectures=("llama", "qwen3_moe"), support_dtypes=("float32",),
        launch=_model(2, 64, 128, 300), launch_layers=(1, 2), steps=3,
        folder=_model(2, 64, 128, 300, dtype="float32"), streams=1, stream_tokens=8,
        rows=_rows(2, 64, 128, 300, 4, 64), sequences=(3,), row_steps=2,
        exact_folder=_model(2, 64, 128, 300, dtype="float32"),
        exact=("--trials", "1", "--prompt-tokens", "12", "--decode-tokens", "6"),
        kv=("--trials", "1", "--prompt-tokens", "12", "--decode-tokens", "6"),
        send=_model(3, 64, 128, 300), send_rows=3,
        demo=(),
    ),
}  # fmt: skip
