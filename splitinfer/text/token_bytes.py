"""The bytes of single tokens, which a decoder does not show: a token may be a part of a character.

Vocabularies write bytes in one of two ways, which the tokenizer's decoder tells:

- *byte level* (GPT-2, Qwen, Llama 3): each byte is one printable character.
- *byte fallback* (Llama 2, Gemma): text is text, with U+2581 for a space, and a byte that is not text is ``<0xE2>``.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def bytes_of_tokens(wrapper: Any) -> Callable[[Sequence[int]], list[bytes]]:
    """What maps token ids to their bytes. ``wrapper``: a Hugging Face tokenizer, or mlx-lm's wrapper of one."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # here, because importing it takes long

    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()} if _is_byte_level(wrapper) else None
    added = {i: str(token).encode() for i, token in getattr(wrapper, "added_tokens_decoder", {}).items()}

    def bytes_of(piece: object) -> bytes:
        if not isinstance(piece, str):
            return b""  # an id of padding
        if alphabet is not None and all(letter in alphabet for letter in piece):
            return bytes(alphabet[letter] for letter in piece)
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()

    def bytes_of_all(token_ids: Sequence[int]) -> list[bytes]:
        pieces = wrapper.convert_ids_to_tokens(list(token_ids))  # all at once: one by one takes five times as long
        return [added[i] if i in added else bytes_of(piece) for i, piece in zip(token_ids, pieces, strict=True)]

    return bytes_of_all


def _is_byte_level(wrapper: Any) -> bool:
    """Whether the decoder maps characters to bytes."""
    backend = getattr(wrapper, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return any(one.get("type") == "ByteLevel" for one in (decoder, *decoder.get("decoders", ())))
