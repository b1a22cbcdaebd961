"""Trains the models of a pair one after the other into their folders, until done or interrupted."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from demo_training.corpus import Corpus
from demo_training.folders import open_folder, save_weights
from demo_training.model import Shape, build, on_gpu
from demo_training.training import Outcome, Recipe, Say, train

Plans = dict[str, tuple[Shape, Recipe]]  # by the name of the folder, in the order of training


def train_pair(out: Path, plans: Plans, corpus: Corpus, tokenizer: Tokenizer, say: Say) -> dict[str, Outcome]:
    """Train the models of ``plans`` in its order; an interrupt ends the training, with the models saved as they are."""
    outcomes: dict[str, Outcome] = {}
    device = "the GPU" if on_gpu() else "the CPU"
    with first_interrupt_stops() as stop:
        for name, (shape, recipe) in plans.items():
            if not stop():
                say(f"{name}: {shape.layers} layers of {shape.hidden}, {str(recipe.dtype).split('.')[-1]} on {device}")
                outcomes[name] = train_folder(out / name, shape, recipe, corpus, tokenizer, say=say, stop=stop)
    return outcomes


def train_folder(
    folder: Path, shape: Shape, recipe: Recipe, corpus: Corpus, tokenizer: Tokenizer, *, say: Say, stop: Any
) -> Outcome:
    config = shape.config(tokenizer.get_vocab_size())
    open_folder(folder, config, tokenizer)
    model = build(config, recipe.seed)
    return train(model, corpus, recipe, save=lambda: save_weights(model, folder), say=say, should_stop=stop)


@contextmanager
def first_interrupt_stops() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks the training to end after its step; a second one interrupts as usual."""
    asked = threading.Event()
    usual = signal.getsignal(signal.SIGINT)

    def ask(_number: int, _frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, usual)
