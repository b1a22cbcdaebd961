"""How much an approximation changes a model's output, on text. At each position both ways of computing get the text so
far (teacher forcing) and give the next token's distribution.

    KL        sum over tokens of p log(p / q): p computed exactly, q approximately; mean, and the 99th of 100 positions
    top-1     the share of positions where both find the same token likeliest
    perplexity of the text under each, and by how much it changes, with a 95 % interval: positions differ far more from
              each other than the two ways do at one position, so the interval is of the differences
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.cut import StageModel
from splitinfer.models.loader import count_layers, load_stage, resolve_dtype, survey
from splitinfer.models.memory import on_gpu

_CHUNK = 128


def whole_model(checkpoint: Checkpoint, dtype: str) -> StageModel:
    """The model as one stage in this process."""
    return one_stage(checkpoint, dtype, 0, count_layers(checkpoint))


def one_stage(checkpoint: Checkpoint, dtype: str, start: int, end: int) -> StageModel:
    """Some layers of the model in this process."""
    resolved = resolve_dtype(dtype, gpu=on_gpu())
    found = survey(checkpoint, start, end, resolved)
    return load_stage(checkpoint, found, start, end, resolved, lambda _done, _total: None)


def logprobs(
    stages: Sequence[StageModel], text: list[int], vocab_size: int, cross: Callable[[mx.array], mx.array] = lambda x: x
) -> mx.array:
    """Log probabilities of the tokenizer's vocabulary, [n, vocabulary] in float32, over a text that is read in chunks,
    as prompts are. ``cross``: what becomes of hidden states between two stages."""
    caches, found = [stage.make_caches() for stage in stages], []
    for at in range(0, len(text), _CHUNK):
        ids = mx.array([text[at : at + _CHUNK]], dtype=mx.int32)
        out = stages[0](ids, caches[0], None, ids.shape[1])
        for stage, own in zip(stages[1:], caches[1:], strict=True):
            out = stage(ids, own, cross(out), ids.shape[1])
        found.append(out[0])
        mx.eval(found[-1])
    logits = mx.concatenate(found)[:, :vocab_size].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@dataclass(slots=True)
class Fidelity:
    """Measurements of one approximation, in nats; one entry for each position."""

    kl: list[float] = field(default_factory=list)
    worse: list[float] = field(default_factory=list)  # lost on the text's token
    nats: list[float] = field(default_factory=list)  # of the text's token, computed exactly
    num_same: int = 0
    most_off: float = 0.0

    def add(self, exact: mx.array, other: mx.array, text: list[int]) -> None:
        """Add one text and both ways' log probabilities, [n, vocabulary]."""
        self.kl += cast(list[float], mx.maximum((mx.exp(exact) * (exact - other)).sum(-1), 0.0).tolist())
        self.num_same += cast(int, (mx.argmax(exact, -1) == mx.argmax(other, -1)).sum().item())
        self.most_off = max(self.most_off, cast(float, mx.abs(exact - other).max().item()))
        targets = mx.array(text[1:])[:, None]
        own, theirs = (-mx.take_along_axis(one[:-1], targets, axis=-1)[:, 0] for one in (exact, other))
        self.nats += cast(list[float], own.tolist())
        self.worse += cast(list[float], (theirs - own).tolist())

    def as_dict(self) -> dict[str, Any]:
        """The figures of a document."""
        ordered, n = sorted(self.kl), len(self.kl)
        mean, error = statistics.mean(self.worse), 1.96 * statistics.stdev(self.worse) / len(self.worse) ** 0.5
        return {
            "positions": n,
            "mean_kl": statistics.mean(self.kl),
            "p99_kl": ordered[min(n - 1, math.ceil(0.99 * n) - 1)],
            "top1_agreement": self.num_same / n,
            "perplexity": math.exp(statistics.mean(self.nats)),
            "perplexity_change_percent": 100 * math.expm1(mean),
            "perplexity_change_interval": [100 * math.expm1(mean - error), 100 * math.expm1(mean + error)],
            "largest_logprob_difference": self.most_off,
        }


HEADINGS = ("mean KL", "p99 KL", "top-1 agreement", "perplexity", "change (95 %)")


def cells(figures: Mapping[str, Any]) -> list[str]:
    """A document's figures below ``HEADINGS``."""
    low, high = figures["perplexity_change_interval"]
    return [
        f"{figures['mean_kl']:.2e}",
        f"{figures['p99_kl']:.2e}",
        f"{100 * figures['top1_agreement']:.2f} %",
        f"{figures['perplexity']:.2f}",
        f"{figures['perplexity_change_percent']:+.3f} % ({low:+.3f} to {high:+.3f})",
    ]
