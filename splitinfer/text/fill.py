"""Filling in the middle: what stands before a gap and behind it, as a model was trained to be shown it.

    <|fim_prefix|>def add(a, b):\\n    return <|fim_suffix|>\\n\\nprint(add(1, 2))\\n<|fim_middle|>   ->   a + b

A tokenizer that has the marks of one family has a model that was trained on them. Other files stand before that, each
behind a mark and its name, where there are such marks (Qwen2.5-Coder's technical report, "Repo-Level FIM").
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, Refact
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_SUFFIX_FIRST = (
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral, whose answer goes on with the prefix
)
_REPOSITORY, _FILE = "<|repo_name|>", "<|file_sep|>"
_ENDS = ("<|fim_pad|>", _REPOSITORY, _FILE, "<|file_separator|>", "<|endoftext|>", "<EOT>", "▁<EOT>")
_NAMES = ("project", "file")  # of what a client names nothing of


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap in a text: what is before it and behind it, what it surely begins with, and other files by their names."""

    prefix: str | tuple[int, ...]
    suffix: str
    begun: str = ""
    files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Marks:
    """A model's marks. ``ids``: theirs, and those of others that stand in nothing that fills a gap."""

    prefix: str
    suffix: str
    middle: str
    is_suffix_first: bool
    ids: Mapping[str, int]

    def around(self, gap: Gap, encode: Callable[[str], list[int]]) -> Iterator[int]:
        """Yield a gap as token ids. ``encode``: of a text in which no mark is one."""
        prefix = encode(gap.prefix) if isinstance(gap.prefix, str) else gap.prefix
        before, behind = [self.ids[self.prefix], *prefix], [self.ids[self.suffix], *encode(gap.suffix)]
        if gap.files and {_REPOSITORY, _FILE} <= self.ids.keys():
            yield from (self.ids[_REPOSITORY], *encode(f"{_NAMES[0]}\n"))
            for name, text in gap.files:
                yield from (self.ids[_FILE], *encode(f"{name}\n{text}\n"))
            yield from (self.ids[_FILE], *encode(f"{_NAMES[1]}\n"))
        else:
            yield from encode("".join(f"{text}\n" for _, text in gap.files))
        yield from (*behind, *before) if self.is_suffix_first else (*before, *behind)
        yield from [self.ids[self.middle]] if self.middle else []
        yield from encode(gap.begun)


def marks_in(vocabulary: Mapping[str, int]) -> Marks | None:
    """Return the marks of a vocabulary; ``None``: it has none."""
    for names in (*_MARKS, *_SUFFIX_FIRST):
        if all(name in vocabulary for name in names if name):
            there = {name: vocabulary[name] for name in (*names, *_ENDS) if name in vocabulary}
            return Marks(*names, is_suffix_first=names in _SUFFIX_FIRST, ids=there)
    return None
