"""Text to measure on: passages of a file, or beginnings of tales."""

from pathlib import Path

from splitinfer.errors import ConfigError

OPENINGS = (
    "Once upon a time there lived an old king who had three sons, and he did not know which of them should rule",
    "The fisherman went down to the sea in the morning, and when he drew in his net, there was a golden fish in it",
    "In the middle of the forest stood a little house, and an old woman looked out of its window and said",
)


def passages(path: Path, count: int, num_characters: int) -> list[str]:
    """Parts of a text, evenly far from each other, from beginnings of paragraphs.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    found = []
    for i in range(count):
        at = text.find("\n\n", (2 * i + 1) * len(text) // (2 * count))
        found.append(" ".join(text[max(at, 0) :].split())[:num_characters])
    return found
