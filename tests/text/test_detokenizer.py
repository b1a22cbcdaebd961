"""Pieces of text join to the whole text, whatever the tokens; half characters never show."""

import itertools
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from splitinfer.demo import TARGET
from splitinfer.text.detokenizer import REPLACEMENT, Detokenizer
from splitinfer.text.tokenizer import Tokenizer

DEMO = Tokenizer.from_folder(TARGET)

# Characters of one to four bytes, those that combine, control characters, and now and then U+FFFD itself.
interesting = st.sampled_from("a b\n\t\x00\x1bé\u0301ñ€中文한글😀👩‍👩‍👧‍👦🇩🇪\u200d\ufe0f\u202e�")
texts = st.text(interesting | st.characters(exclude_categories=["Cs"]), max_size=40)


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


# ----- byte-level vocabulary: the demo model's --------------------------------------------------------


@given(texts, st.booleans())
@example("����", False)
@example("�" * 50 + "😀", True)
def test_byte_level_text(text: str, shows_markers: bool):
    token_ids = DEMO.encode(text)
    given_out = pieces(DEMO.detokenizer(shows_markers=shows_markers), token_ids)
    assert "".join(given_out) == DEMO.decode(token_ids)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(given_out)


@given(texts, st.data())
def test_a_text_that_is_cut_ends_before_a_character_that_is_not_whole(text: str, data: st.DataObject):
    token_ids, detokenizer = DEMO.encode(text), DEMO.detokenizer()
    out = "".join(detokenizer.add(each) for each in token_ids[: data.draw(st.integers(0, len(token_ids)))])
    out += detokenizer.flush(is_cut=True)
    assert DEMO.decode(token_ids).startswith(out)
    assert REPLACEMENT in text or REPLACEMENT not in out


byte_tokens = [token_id for token_id in range(DEMO.vocab_size) if DEMO.decode([token_id]) == REPLACEMENT]
BROKEN = byte_tokens[0]


@given(st.lists(st.sampled_from(byte_tokens) | st.integers(0, DEMO.vocab_size - 1), max_size=80))
def test_byte_level_ids_of_any_kind(token_ids: list[int]):
    """Invalid UTF-8, special tokens in the middle of a character: still exactly what decode says of the whole, and
    little of it waits."""
    detokenizer = DEMO.detokenizer()
    out = ""
    for number, token_id in enumerate(token_ids, start=1):
        out += detokenizer.add(token_id)
        certain = DEMO.decode(token_ids[:number])
        assert certain.startswith(out)
        waiting = certain[len(out) :]
        assert waiting == REPLACEMENT * len(waiting)
        assert len(waiting) <= 16
    assert out + detokenizer.flush() == DEMO.decode(token_ids)


def test_the_demo_vocabulary_splits_characters():
    """Else the tests above would show nothing."""
    assert len(byte_tokens) > 100
    given_out = pieces(DEMO.detokenizer(), DEMO.encode("x😀y"))
    assert given_out[:-1] == ["x", "", "", "", "😀", "y"]


# ----- a vocabulary with byte fallback and a dropped leading space, as sentencepiece makes them -------

WORDS = ["▁", "▁a", "a", "▁ab", "b", "é", "▁中", "\n"]
VOCABULARY = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
TOKEN_TO_ID = {token: token_id for token_id, token in enumerate(VOCABULARY)}
SPACE = decoders.Replace("▁", " ")
TRIMMING = decoders.Sequence([SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])  # llama
KEEPING = decoders.Sequence([SPACE, decoders.ByteFallback(), decoders.Fuse()])  # gemma


def decode_with(decoder: decoders.Decoder) -> Callable[[list[int]], str]:
    return lambda token_ids: decoder.decode([VOCABULARY[token_id] for token_id in token_ids])


def encode(text: str) -> list[int]:
    text = "▁" + text.replace(" ", "▁")
    token_ids = []
    while text:
        word = max((word for word in WORDS if text.startswith(word)), key=len, default="")
        token_ids += [TOKEN_TO_ID[word]] if word else [TOKEN_TO_ID[f"<0x{byte:02X}>"] for byte in text[0].encode()]
        text = text[max(1, len(word)) :]
    return token_ids


fallback_texts = st.text("a ab\né中x€😀文�", max_size=40).filter(lambda text: REPLACEMENT * 5 not in text)


@pytest.mark.parametrize("decoder", [TRIMMING, KEEPING], ids=["trimming", "keeping"])
@given(text=fallback_texts)
@example(text="  a")
@example(text="a  a   a")
@example(text="😀😀😀€€")
@example(text="����😀")
def test_byte_fallback_text(decoder: decoders.Decoder, text: str):
    decode = decode_with(decoder)
    token_ids = encode(text)
    given_out = "".join(pieces(Detokenizer(decode), token_ids))
    assert given_out == decode(token_ids)
    assert given_out.removeprefix(" " if decoder is KEEPING else "") == text


@given(st.lists(st.sampled_from(WORDS) | st.sampled_from(VOCABULARY), max_size=60))
@example(["<0xFF>"] * 40 + ["a"])
def test_byte_fallback_ids_of_any_kind(tokens: list[str]):
    """Bytes that spell no text: a run of n shows as 1 to n characters, and everything around it is exact."""
    decode = decode_with(KEEPING)
    pattern = ""
    for is_bytes, group in itertools.groupby(tokens, key=lambda token: token.startswith("<0x")):
        run = [TOKEN_TO_ID[token] for token in group]
        pattern += f"(.|\n){{1,{len(run)}}}" if is_bytes else re.escape(decode(run))
    given_out = "".join(pieces(Detokenizer(decode), [TOKEN_TO_ID[token] for token in tokens]))
    assert re.fullmatch(pattern, given_out)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["▁a", "", "▁a"], ["a", "", " a", ""]),
        (["▁", "", "▁a"], ["", "", " a", ""]),
        (["", "▁", "", "", "▁a", "", "", "▁a"], ["", "", "", "", " a", "", "", " a", ""]),
    ],
)
def test_tokens_without_text_are_no_beginning(tokens: list[str], expected: list[str]):
    """The decoder drops a space at the beginning, and none behind a token that merely shows nothing."""

    def decode(token_ids: list[int]) -> str:
        return TRIMMING.decode([tokens[token_id] for token_id in token_ids if tokens[token_id]])

    assert pieces(Detokenizer(decode), list(range(len(tokens)))) == expected


# ----- bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token_ids",
    [
        [5] * 500,
        [BROKEN] * 500,  # never a character
        DEMO.encode("�") * 200,
        DEMO.encode("€") * 200,
        [BROKEN, 0, 1, 2] * 200,
    ],
)
def test_a_token_costs_the_same_everywhere(token_ids: list[int]):
    sizes = []

    def decode(window: list[int]) -> str:
        sizes.append(len(window))
        return DEMO.decode(window)

    detokenizer = Detokenizer(decode, skipped={0, 1, 2})
    waits = [not detokenizer.add(token_id) for token_id in token_ids if token_id > 2]
    assert max(sizes) <= 32
    assert len(sizes) <= 3 * len(token_ids)  # calls
    longest_wait = max((len(list(run)) for waiting, run in itertools.groupby(waits) if waiting), default=0)
    assert longest_wait < 16
