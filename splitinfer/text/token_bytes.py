"""The bytes of single tokens, which a decoder does not show: a token may be a part of a character.

Vocabularies write bytes in one of two ways, which the tokenizer's decoder tells:

- *byte level* (GPT-2, Qwen, Llama 3): each byte is one printable character. The 188 printable bytes of Latin-1 stand
  for themselves, and the other 68 for the characters from U+0100 on, in order.
- *byte fallback* (Llama 2, Gemma): text is text, with U+2581 for a space, and a byte that is not text is ``<0xE2>``.
"""

import json
import re
from collections.abc import Callable
from typing import Any

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def bytes_of_tokens(wrapper: Any) -> Callable[[int], bytes]:
    """What maps a token id to its bytes. ``wrapper``: a Hugging Face tokenizer, or mlx-lm's wrapper of one."""
    alphabet = byte_level_alphabet() if _is_byte_level(wrapper) else None
    added = {i: str(token) for i, token in getattr(wrapper, "added_tokens_decoder", {}).items()}

    def bytes_of(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id].encode()
        piece = wrapper.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return b""  # an id of padding
        if alphabet is not None and all(letter in alphabet for letter in piece):
            return bytes(alphabet[letter] for letter in piece)
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()

    return bytes_of


def _is_byte_level(wrapper: Any) -> bool:
    """Whether the decoder maps characters to bytes."""
    backend = getattr(wrapper, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return any(one.get("type") == "ByteLevel" for one in (decoder, *decoder.get("decoders", ())))
