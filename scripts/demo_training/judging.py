"""Evaluates models on held-out text.

Bits per byte = nats per token / ln 2 / bytes per token, the last measured on the held-out text; unlike nats per token
it compares models with different tokenizers. Draft agreement is the share of held-out positions where the draft's
likeliest next token is also the target's, both given the true text: the share of greedy drafts that would be accepted.
Both are computed from the saved folders. The text is read in windows of ``--length`` tokens, each without context.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm import load

from demo_training.corpus import Corpus, Tokens, windows
from demo_training.model import Model, named, number
from splitinfer.errors import ConfigError

MOST_WINDOWS = 512  # in an evaluation, spread over all of the held-out text


@dataclass(frozen=True)
class Judgement:
    """The figures of one model on the held-out text."""

    parameters: int
    nats_per_token: float
    bits_per_byte: float


def judge(model: Model, held: Tokens, *, batch: int = 8) -> tuple[float, Tokens]:
    """Nats per token over the windows, and the likeliest next token at each position."""
    nats, likeliest = 0.0, []
    for at in range(0, len(held), batch):
        tokens = mx.array(held[at : at + batch])
        logits = model(tokens[:, :-1]).astype(mx.float32)
        nats += number(nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="sum"))
        likeliest.append(np.array(mx.argmax(logits, axis=-1), np.int32))
    greedy = np.concatenate(likeliest)
    return nats / greedy.size, greedy


def judge_folder(folder: Path, corpus: Corpus, length: int) -> tuple[Judgement, Tokens]:
    """Evaluate saved weights, in float32: float16 matrices are slow on a CPU, and the figures are the same."""
    try:
        model = load(str(folder))[0]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} does not load as a model: {error}") from error
    model.set_dtype(mx.float32)
    nats, greedy = judge(model, windows(corpus.held, length, most=MOST_WINDOWS))
    parameters = sum(w.size for w in named(model).values())
    return Judgement(parameters, nats, nats / math.log(2) / corpus.bytes_per_token), greedy


def judge_pair(target: Path, draft: Path | None, corpus: Corpus, length: int) -> dict[str, Any]:
    """The figures of the report: each model's, and the share of positions at which the two agree."""
    judgement, greedy = judge_folder(target, corpus, length)
    figures: dict[str, Any] = {"target": asdict(judgement), "draft": None, "draft_agreement": None}
    if draft is not None:
        judgement, drafted = judge_folder(draft, corpus, length)
        figures |= {"draft": asdict(judgement), "draft_agreement": float((greedy == drafted).mean())}
    return figures | {"judged_tokens": greedy.size, "bytes_per_token": corpus.bytes_per_token}
