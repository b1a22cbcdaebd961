"""Makes OUT/drafter for OUT/target: features into a cache, training, weights, and how often its drafts are right."""

import hashlib
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from demo_training.corpus import Books, encode
from demo_training.drafter.model import Drafter, Shape
from demo_training.drafter.sampling import PROMPT, Features, features
from demo_training.drafter.target import Target
from demo_training.drafter.training import Recipe, agreement, train
from demo_training.folders import WEIGHTS, check_writable
from demo_training.tokenizer import read_tokenizer
from demo_training.training import Say
from splitinfer.places import caches

_HELD = 128  # sequences of held-out text
_DEPTH = 6  # drafts of a chain that is judged
_CHECKPOINT = 120.0  # seconds


def make_drafter(out: Path, books: Books, minutes: float, sequences: int, seed: int, say: Say) -> None:
    """Train a drafter of ``out/target`` for so many minutes, into ``out/drafter``.

    Raises:
        ConfigError: there is too little text, or a folder cannot be written.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    folder, shape = out / "drafter", Shape()
    check_writable(folder)
    corpus = encode(books, read_tokenizer(out / "target"), length=PROMPT)
    config = json.loads((out / "target" / "config.json").read_text())
    target = Target(out / "target", config, shape.taps)
    cache = caches() / "demo_training" / hashlib.blake2b((out / "target" / WEIGHTS).read_bytes()).hexdigest()[:16]
    text = features(cache / f"train-{sequences}", target, corpus.train, sequences, seed)
    held = features(cache / "held", target, corpus.held, _HELD, seed)
    drafter, saved = Drafter(shape, target), [time.monotonic()]

    def checkpoint(step: int, loss: float) -> None:
        if time.monotonic() - saved[0] > _CHECKPOINT:
            saved[0] = time.monotonic()
            save(drafter, folder)
            say(f"step {step}, loss {loss:.3f}, {_shares(drafter, target, held)}")

    train(drafter, target, text, Recipe(minutes, seed=seed), checkpoint=checkpoint)
    save(drafter, folder)
    say(f"drafts right on held-out text, by place: {_shares(drafter, target, held)}")


def save(drafter: Drafter, folder: Path) -> None:
    """Write the weights and the config.json."""
    tensors, config = drafter.saved()
    save_file(tensors, folder / f".partial-{WEIGHTS}", metadata={"format": "mlx"})
    (folder / f".partial-{WEIGHTS}").replace(folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _shares(drafter: Drafter, target: Target, held: Features) -> str:
    found = agreement(drafter, target, held, _DEPTH)
    return ", ".join(f"{name} {' '.join(f'{share:.3f}' for share in shares)}" for name, shares in found)
