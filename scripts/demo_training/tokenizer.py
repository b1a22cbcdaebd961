"""The tokenizer of the pair: a byte-level BPE, which can encode every text."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from splitinfer.errors import ConfigError

END = "<|end|>"  # between texts, and at the end of an answer
SPECIAL_TOKENS = [END, "<|user|>", "<|tale|>"]


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE with ``vocab`` tokens; END has id 0."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab < len(SPECIAL_TOKENS) + len(alphabet):
        least = len(SPECIAL_TOKENS) + len(alphabet)
        raise ConfigError(f"a vocabulary of {vocab} is too small: bytes and special tokens alone take {least}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    # By lines, because the trainer processes strings in parallel and there are few books.
    lines = (line for text in texts for line in text.splitlines(keepends=True))
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer.json of a model folder, or the file itself."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer at {file}.")
    return Tokenizer.from_file(str(file))


def check_same_tokenizer(target: Path, draft: Path) -> None:
    if read_tokenizer(target).get_vocab() != read_tokenizer(draft).get_vocab():
        raise ConfigError(f"{target} and {draft} do not share a tokenizer, so the draft cannot draft for the target.")
