"""Tokenizers with added tokens of the shapes that models have, each as a model's folder."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from splitinfer import SamplingParams
from splitinfer.llm.forms import AnswerForms
from splitinfer.text.tokenizer import Tokenizer as TextTokenizer

MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
HTML = ("<b>", "</b>", "<h1>", "<table>", "<td>", "<br/>")
PIPES = ("<|im_start|>", "<|box|>", "<|tool|>")
SQUARE = ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]")
NESTED = ("<b>", "<b><i>", "<<b>>", "<a>b>", "<b", "b>", "<tool_call>", "<tool_call>\n")
STRANGE = ("<a b>", "<>", "<\uff5cx\uff5c>", "\uff5cx\uff5c", "<é>", "<0x41>", "<[7]>", '<"q">', "<a\\b>", "<a/b>")
_WORDS = ("ab", "abc", "x<", "call", "tool", '":', '","', '{"', '"}', "name", "th", "in", "ink")
END = "<|end|>"


def byte_level(names: Sequence[str], **options: bool) -> Tokenizer:
    """As of GPT-2, Llama 3, Qwen, GLM, DeepSeek."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges, vocab = list[tuple[str, str]](), {letter: i for i, letter in enumerate(alphabet)}
    for word in _WORDS:
        for i in range(1, len(word)):
            if word[: i + 1] not in vocab:
                vocab[word[: i + 1]] = len(vocab)
                merges.append((word[:i], word[i]))
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _with(made, names, **options)


def byte_fallback(names: Sequence[str], *, puts_blank: bool, **options: bool) -> Tokenizer:
    """As of Llama 2 (a blank is put before a text) and Gemma (its added tokens are in the vocabulary as well)."""
    letters = [chr(i) for i in range(33, 127)]
    pieces = [*(f"<0x{i:02X}>" for i in range(256)), "\u2581", *letters, *_WORDS, *([] if puts_blank else names)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [(word[:i], word[i]) for word in _WORDS for i in range(1, len(word)) if word[: i + 1] in vocab]
    made = Tokenizer(models.BPE(vocab=vocab, merges=[pair for pair in merges if pair[0] in vocab], byte_fallback=True))
    blank = normalizers.Replace(" ", "\u2581")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blank]) if puts_blank else blank
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with(made, names, **options)


def _with(made: Tokenizer, names: Sequence[str], **options: bool) -> Tokenizer:
    made.add_special_tokens([AddedToken(END, special=True)])
    settings = {"special": False, "normalized": False, **options}
    made.add_tokens([AddedToken(name, **settings) for name in names])
    return made


SHAPES: dict[str, tuple[tuple[str, ...], Callable[[Sequence[str]], Tokenizer]]] = {
    "markup": (MARKUP, byte_level),
    "markup, special": (MARKUP, lambda names: byte_level(names, special=True)),
    "pipes": (PIPES, byte_level),
    "pipes, special": (PIPES, lambda names: byte_level(names, special=True)),
    "square": (SQUARE, byte_level),
    "square, special": (SQUARE, lambda names: byte_level(names, special=True)),
    "names within names": (NESTED, byte_level),
    "strange names": (STRANGE, byte_level),
    "blanks are stripped": (MARKUP, lambda names: byte_level(names, lstrip=True, rstrip=True, normalized=True)),
    "byte fallback, in the vocabulary": (HTML, lambda names: byte_fallback(names, puts_blank=False)),
    "byte fallback, a blank before": (HTML, lambda names: byte_fallback(names, puts_blank=True)),
}
"""Eleven shapes: the names of the added tokens, and what makes the tokenizer."""


def save(folder: Path, made: Tokenizer) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclass
class Prompts:
    """What ``AnswerForms`` asks of a model's prompts."""

    tokenizer: TextTokenizer

    @property
    def eos_tokens(self) -> frozenset[int]:
        return self.tokenizer.eos_token_ids

    def end_tokens(self, _params: SamplingParams) -> frozenset[int]:
        return self.eos_tokens

    @property
    def needed(self) -> TextTokenizer:
        return self.tokenizer


def forms(folder: Path) -> AnswerForms:
    return AnswerForms(Prompts(TextTokenizer.from_folder(folder)))  # type: ignore[arg-type]
