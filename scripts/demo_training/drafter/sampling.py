"""What a drafter learns from: continuations that the target itself writes, and its hidden states.

A drafter is right where it writes what the target writes, so its text is the target's own: it goes on from passages of
the training text, half of the time with the likeliest token, else with a token of its distribution.

    CACHE/tokens.npy [sequences, length] int16     CACHE/hidden.npy [sequences, length, taps * d] float16
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demo_training.drafter.target import Target

LENGTH = 384  # tokens of a sequence
PROMPT = 128  # tokens of the training text before a continuation
_AT_ONCE = 128  # sequences


@dataclass(frozen=True)
class Features:
    """Text of the target and its hidden states: memory-mapped, see ``sampling``."""

    tokens: npt.NDArray[np.int16]
    hidden: npt.NDArray[np.float16]

    def batch(self, rows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(self.tokens[rows].astype(np.int64))
        return tokens, torch.from_numpy(np.asarray(self.hidden[rows])).bfloat16()


def features(cache: Path, target: Target, ids: npt.NDArray[np.int32], sequences: int, seed: int) -> Features:
    """So many sequences, unless they are stored already; an interrupted run is gone on with."""
    cache.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shape = (sequences, LENGTH, len(target.taps) * target.config["hidden_size"])
    tokens = _file(cache / "tokens.npy", np.int16, shape[:2])
    hidden = _file(cache / "hidden.npy", np.float16, shape)
    for first in range(0, sequences, _AT_ONCE):
        count = min(_AT_ONCE, sequences - first)
        starts = rng.integers(0, len(ids) - PROMPT, count)
        prompts = torch.from_numpy(np.stack([ids[at : at + PROMPT] for at in starts])).long()
        if tokens[first : first + count].any():
            continue
        greedy = torch.arange(count) % 2 == 0
        found, states = continued(target, prompts, greedy)
        hidden[first : first + count] = states.half().numpy()
        tokens[first : first + count] = found.short().numpy()
    return Features(tokens, hidden)


def _file(path: Path, dtype: type, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    mode: Any = "r+" if path.exists() else "w+"
    found: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode, dtype, shape)
    return found


@torch.no_grad()  # type: ignore[untyped-decorator]
def continued(target: Target, prompts: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, LENGTH] tokens that begin with the prompts, and their hidden states; ``greedy``: which are."""
    batch, at = prompts.shape
    caches = target.caches(batch, LENGTH)
    states, size = [target(prompts, 0, caches)], target.config["hidden_size"]
    found = [prompts]
    for position in range(at, LENGTH):
        logits = target.logits(states[-1][:, -1:, -size:]).float()[:, 0]
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        token = torch.where(greedy[:, None], logits, logits + noise).argmax(-1, keepdim=True)
        found.append(token)
        states.append(target(token, position, caches))
    return torch.cat(found, 1), torch.cat(states, 1)
