"""How often a draft model agrees with its target on a given text: ``python -m
splitinfer.bench.speculation.agreement``.

Teacher-forced: at each position both models get the text so far, and either choose the same next token or not; once
greedily, and once sampling with the same Gumbel noise. Both models are mlx-lm's, whole, in one process.

    {"target": ..., "draft": ..., "dtype": ..., "texts": [[...], ...], "temperature": 0.8, "seed": 1}
        -> {"greedy": 0.7, "sampled": 0.6, "positions": 4000}
"""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.utils import load_model

from splitinfer.bench.shared.child_process import serve_commands
from splitinfer.bench.shared.fidelity import logprobs_of
from splitinfer.core.rng import position_key


def agreement(options: dict[str, Any]) -> dict[str, float]:
    """The shares of positions at which both models choose the same token."""
    models = [_load(options[name], options["dtype"]) for name in ("target", "draft")]
    greedy = sampled = count = 0
    for number, text in enumerate(options["texts"]):
        target, draft = (logprobs_of(model(mx.array([text]))[0], options["vocab_size"]) for model in models)
        noise = _noise(options["seed"] + number, len(text), options["vocab_size"])
        t = options["temperature"]
        greedy += _num_equal(mx.argmax(target, -1), mx.argmax(draft, -1))
        sampled += _num_equal(mx.argmax(target / t + noise, -1), mx.argmax(draft / t + noise, -1))
        count += len(text)
    return {"greedy": greedy / count, "sampled": sampled / count, "positions": count}


def _num_equal(a: mx.array, b: mx.array) -> int:
    return cast(int, (a == b).sum().item())


def _load(folder: str, dtype: str | None) -> Any:
    model, _ = load_model(Path(folder))
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
    return model


def _noise(seed: int, length: int, vocab_size: int) -> mx.array:
    keys = mx.array([position_key(seed, position) for position in range(1, length + 1)], dtype=mx.uint32)
    drawn: mx.array = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
    return drawn


if __name__ == "__main__":
    serve_commands(agreement)
