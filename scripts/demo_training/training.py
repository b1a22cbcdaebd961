"""Trains one model, from random weights to the end of its budget.

The optimizer. AdamW, with weight decay on the matrices only (a norm's gain has no reason to shrink), gradients clipped
to norm 1. The learning rate climbs linearly over the first steps and then follows half a cosine down to 5 % of its
peak. The cosine runs over the spent share of the budget, in steps or in minutes, whichever is larger: a slow machine
takes fewer steps and still ends at a low rate.

Arithmetic. The weights and the optimizer's state are float32; a step computes with a bfloat16 copy on a GPU and in
float32 on a CPU, where bfloat16 has no fast path.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx import optimizers as optim
from mlx.utils import tree_map

from demo_training.corpus import Corpus, Tokens, windows
from demo_training.judging import judge
from demo_training.model import Model, number, on_gpu

WARMUP_STEPS = 100
FLOOR = 0.05  # of the peak learning rate, at the end of the cosine
SECONDS_BETWEEN_CHECKPOINTS = 120.0
PROBE_WINDOWS = 16  # held-out windows evaluated while training

Say = Callable[[str], None]


@dataclass(frozen=True)
class Budget:
    """How long to train; with both bounds, the one reached first."""

    steps: int | None = None
    minutes: float | None = None

    def spent(self, step: int, seconds: float) -> float:
        """The share of the budget that is spent; 1 or more ends the training."""
        by_step = step / self.steps if self.steps else 0.0
        by_clock = seconds / 60 / self.minutes if self.minutes else 0.0
        return max(by_step, by_clock)

    def warmup(self) -> int:
        return max(1, min(WARMUP_STEPS, self.steps // 10)) if self.steps else WARMUP_STEPS


@dataclass(frozen=True)
class Recipe:
    """How one model is trained: ``batch`` windows of ``length`` tokens in a step, computed in ``dtype``."""

    budget: Budget
    peak_lr: float
    batch: int = 8
    length: int = 512
    seed: int = 0
    dtype: mx.Dtype = mx.float32


@dataclass(frozen=True)
class Outcome:
    """The figures of one training run."""

    steps: int
    tokens: int
    seconds: float
    last_loss: float  # nats per token of the last batch


def learning_rate(peak: float, *, step: int, warmup: int, spent: float) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, spent)))
    return peak * min(1.0, (step + 1) / warmup) * (FLOOR + (1 - FLOOR) * cosine)


def make_optimizer(peak_lr: float) -> Any:
    def is_matrix(_path: str, weight: mx.array) -> bool:
        return weight.ndim >= 2

    decaying, plain = (
        optim.AdamW(peak_lr, betas=[0.9, 0.95], weight_decay=decay, bias_correction=True) for decay in (0.1, 0.0)
    )
    return optim.MultiOptimizer([decaying, plain], [is_matrix])


def make_step(model: Model, optimizer: Any, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    """One update: tokens [batch, length + 1] → loss. The model holds the float32 weights between calls."""

    def loss_of(weights: Any, tokens: mx.array) -> mx.array:
        model.update(tree_map(lambda w: w.astype(dtype), weights))
        logits = model(tokens[:, :-1]).astype(mx.float32)
        loss: mx.array = nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")
        return loss

    def step(tokens: mx.array) -> mx.array:
        weights = model.parameters()
        loss, gradients = mx.value_and_grad(loss_of)(weights, tokens)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        model.update(optimizer.apply_gradients(gradients, weights))
        return loss

    optimizer.init(model.trainable_parameters())
    if not on_gpu():  # no faster on a CPU, where it needs a C++ compiler
        return step
    state = [model.state, optimizer.state]
    return mx.compile(step, inputs=state, outputs=state)


def draw_batch(rng: np.random.Generator, ids: Tokens, recipe: Recipe) -> mx.array:
    starts = rng.integers(0, len(ids) - recipe.length, recipe.batch)
    return mx.array(np.stack([ids[at : at + recipe.length + 1] for at in starts]))


def train(
    model: Model,
    corpus: Corpus,
    recipe: Recipe,
    *,
    save: Callable[[], None],
    say: Say,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train until the budget is spent or ``should_stop``, at least one step; ``save`` at intervals and at the end."""
    optimizer = make_optimizer(recipe.peak_lr)
    run = make_step(model, optimizer, recipe.dtype)
    rng = np.random.default_rng(recipe.seed)
    probe = windows(corpus.held, recipe.length, most=PROBE_WINDOWS)
    step, loss = 0, mx.array(math.nan)
    started = saved = time.monotonic()
    while (spent := recipe.budget.spent(step, time.monotonic() - started)) < 1 and not (step and should_stop()):
        optimizer.learning_rate = learning_rate(recipe.peak_lr, step=step, warmup=recipe.budget.warmup(), spent=spent)
        previous, loss = loss, run(draw_batch(rng, corpus.train, recipe))
        mx.async_eval(loss, model.parameters(), optimizer.state)  # type: ignore[no-untyped-call]
        mx.eval(previous)  # one step stays in flight, so that the GPU need not wait for the next batch
        step += 1
        if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
            save()
            say(progress(step, time.monotonic() - started, recipe, number(loss), judge(model, probe)[0]))
            saved = time.monotonic()
    last_loss = number(loss)
    seconds = time.monotonic() - started
    save()
    say(progress(step, seconds, recipe, last_loss, judge(model, probe)[0]))
    return Outcome(step, step * recipe.batch * recipe.length, seconds, last_loss)


def progress(step: int, seconds: float, recipe: Recipe, loss: float, held: float) -> str:
    tokens = step * recipe.batch * recipe.length
    return (
        f"{seconds / 60:6.1f} min, step {step}, {tokens / 1e6:.2f} M tokens, {tokens / max(seconds, 1e-9):.0f} tok/s, "
        f"loss {loss:.3f}, held out {held:.3f} nats/token"
    )
