"""Reads the text, splits it into training and held-out text, and encodes both.

By default the last 3 % of every file's characters are held out, from a line end on; with ``--held-book`` only whole
files are. Neither the models nor a tokenizer made here are trained on held-out text. The tail of a book whose beginning
was trained on is easier than an unseen book, so figures of the two must not be compared; the report names which it is.

    file    |  training text                              |  held  |
            0                                        ~0.97 n       n     (n characters)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_training.tokenizer import END
from splitinfer.errors import ConfigError

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Books:
    """Training and held-out text, one item per file that has any."""

    train: list[str]
    held: list[str]
    how: str  # what was held out, in words


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text as token ids, texts separated by END."""

    train: Tokens
    held: Tokens
    bytes_per_token: float  # of the held-out text


def read_books(folder: Path, *, held_share: float = 0.03, held_books: Sequence[str] = ()) -> Books:
    """Read every .txt file under a folder, and split each into training and held-out text."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder.")
    paths = sorted(path for path in folder.rglob("*.txt") if path.is_file())
    if not paths:
        raise ConfigError(f"{folder} holds no .txt file to learn from.")
    if unknown := set(held_books) - {path.stem for path in paths}:
        raise ConfigError(f"{folder} has no book called {', '.join(sorted(unknown))} to hold out.")
    train, held = [], []
    for path in paths:
        share = held_share if not held_books else float(path.stem in held_books)
        early, late = cut(read_text(path), share)
        train.append(early)
        held.append(late)
    whole = f"whole books: {', '.join(sorted(held_books))}"
    tails = f"the last {held_share * 100:g} % of each of {len(paths)} files"
    return Books([t for t in train if t], [h for h in held if h], whole if held_books else tails)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): convert it or remove it.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def cut(text: str, held_share: float) -> tuple[str, str]:
    """Training text and held-out tail, split just after a line end where there is one."""
    at = round(len(text) * (1 - held_share))
    at = (text.rfind("\n", 0, at) + 1 or at) if at < len(text) else at
    return text[:at], text[at:]


def encode(books: Books, tokenizer: Tokenizer, *, length: int, judge_only: bool = False) -> Corpus:
    """Encode the books; ``length``: tokens of a window.

    Raises:
        ConfigError: there is not one window of training or of held-out text.
    """
    train = np.empty(0, np.int32) if judge_only else to_ids(books.train, tokenizer)
    held = to_ids(books.held, tokenizer)
    least = min(len(held), len(held) if judge_only else len(train))
    if least <= length:
        raise ConfigError(
            f"there is too little text: {len(train)} tokens to train on and {len(held)} held out, "
            f"where --length {length} needs {length + 1} of each; add text, or lower --length."
        )
    num_bytes = sum(len(text.encode()) for text in books.held)
    return Corpus(train, held, bytes_per_token=num_bytes / (len(held) - len(books.held)))


def to_ids(texts: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    end = tokenizer.token_to_id(END) or 0
    ids = [np.array([*tokenizer.encode(text).ids, end], np.int32) for text in texts]
    return np.concatenate(ids) if ids else np.empty(0, np.int32)


def windows(ids: Tokens, length: int, *, most: int) -> Tokens:
    """Windows of ``ids``, [count, length + 1], whose predictions do not overlap; at most ``most``, evenly spaced."""
    count = (len(ids) - 1) // length
    chosen = np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(int)
    return np.stack([ids[i * length : i * length + length + 1] for i in chosen])
