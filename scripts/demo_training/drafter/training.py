"""Trains a drafter: chains of drafts from random tokens of the stored text (EAGLE-3's training-time test).

A chain's first draft comes from the target's hidden states and each further one from the drafter's own, as in use; the
loss of each is the cross-entropy with the target's own distribution there. The matrices are trained with Muon, the rest
with AdamW; the learning rate climbs over some steps and falls as a cosine over the minutes.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from demo_training.drafter.model import Drafter
from demo_training.drafter.sampling import Features
from demo_training.drafter.target import Target

FIRST = 64  # no chain begins before it
WARMUP = 20  # steps
_SAMPLED = 0.7  # of the sequences are sampled ones: greedy ones repeat themselves, and are easy
_MUON, _ADAM = 0.02, 2e-3  # peak learning rates


@dataclass(frozen=True)
class Recipe:
    """``sequences`` with so many ``chains`` each in a step, ``depth`` drafts long; each further one counts less."""

    minutes: float
    sequences: int = 8
    chains: int = 96
    depth: int = 5
    fades: float = 0.85
    seed: int = 0


def train(
    drafter: Drafter,
    target: Target,
    text: Features,
    recipe: Recipe,
    *,
    checkpoint: Callable[[int, float], None],
) -> None:
    """Train for so many minutes. ``checkpoint``: called with step and loss."""
    optimizers = _optimizers(drafter)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    rng, started, step = np.random.default_rng(recipe.seed), time.monotonic(), 0
    while (seconds := time.monotonic() - started) < 60 * recipe.minutes:
        rate = min(1.0, (step + 1) / WARMUP) * (0.02 + 0.49 * (1 + math.cos(math.pi * seconds / 60 / recipe.minutes)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        loss = _step(drafter, target, text, recipe, rng)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        checkpoint(step, loss)


def _optimizers(drafter: Drafter) -> list[torch.optim.Optimizer]:
    def is_inner(name: str, weight: nn.Parameter) -> bool:
        return weight.ndim == 2 and name != "lm_head"

    inner = [w for n, w in drafter.named_parameters() if is_inner(n, w)]
    rest = [w for n, w in drafter.named_parameters() if not is_inner(n, w)]
    muon = torch.optim.Muon(inner, lr=_MUON, weight_decay=0.02)
    return [muon, torch.optim.AdamW(rest, lr=_ADAM, betas=(0.9, 0.95), weight_decay=0.0)]


def _step(drafter: Drafter, target: Target, text: Features, recipe: Recipe, rng: np.random.Generator) -> float:
    tokens, hidden = text.batch(_filled(text, recipe.sequences, rng))
    bases = _bases(rng, len(tokens), recipe, tokens.shape[1])
    probabilities = teacher(target, hidden, bases, recipe.depth)
    logits = drafter(tokens, hidden, bases, recipe.depth)
    losses = -(probabilities * logits.log_softmax(-1)).sum(-1, dtype=torch.float32).mean((1, 2))
    weights = recipe.fades ** torch.arange(recipe.depth)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    return float(loss.detach())


def _filled(text: Features, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Rows of sequences that are sampled already."""
    known = np.flatnonzero(text.tokens[:, -2:].any(1))
    weights = np.where(known % 2, _SAMPLED, 1 - _SAMPLED)
    return np.sort(rng.choice(known, count, replace=False, p=weights / weights.sum()))


def _bases(rng: np.random.Generator, batch: int, recipe: Recipe, length: int) -> Tensor:
    found = rng.random((batch, length - recipe.depth - FIRST)).argsort(1)[:, : recipe.chains] + FIRST
    return torch.from_numpy(np.sort(found, 1))


@torch.no_grad()  # type: ignore[untyped-decorator]
def teacher(target: Target, hidden: Tensor, bases: Tensor, depth: int) -> Tensor:
    """[depth, batch, chains, vocabulary]: the target's probabilities where the drafts of chains are made."""
    size = target.config["hidden_size"]
    found = target.logits(hidden[..., -size:]).softmax(-1)
    batch = torch.arange(len(bases))[:, None]
    return torch.stack([found[batch, bases + step] for step in range(depth)])


@torch.no_grad()  # type: ignore[untyped-decorator]
def agreement(drafter: Drafter, target: Target, text: Features, depth: int) -> Iterator[tuple[str, list[float]]]:
    """Shares of right drafts by place, if those before are right: of the likeliest, and sampled with the same noise.

    Half of the sequences are greedy (``sampling``).
    """
    generator = torch.Generator().manual_seed(0)
    for name, first in (("greedy", 0), ("sampled", 1)):
        tokens, hidden = text.batch(np.arange(first, len(text.tokens), 2))
        bases = torch.arange(128, tokens.shape[1] - depth, 7).expand(len(tokens), -1)
        theirs = teacher(target, hidden, bases, depth).float().log()
        own = drafter(tokens, hidden, bases, depth).float().log_softmax(-1)
        if name == "sampled":
            noise = -torch.log(torch.empty_like(own).exponential_(generator=generator))
            theirs, own = theirs + noise, own + noise
        yield name, (theirs.argmax(-1) == own.argmax(-1)).float().mean((1, 2)).tolist()
