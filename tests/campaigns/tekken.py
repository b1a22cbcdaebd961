"""A random model with a real tokenizer of 131,072 tokens: Mistral's *tekken*, which the library mistral-common ships.

model(FOLDER, FILE)    FILE: mistral_common/data/tekken_240911.json of that library's wheel
"""

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from splitinfer.bench.shared.random_model import Shape, make

_END = 2  # Mistral's </s>


def model(folder: Path, tekken: Path, layers: int = 4) -> Path:
    """A model of ``layers``, made where there is none yet. Its layers are next to nothing; its head is as wide as the
    tokenizer."""
    if (folder / "config.json").exists():
        return folder
    described = json.loads(tekken.read_text(encoding="utf-8"))
    size = described["config"]["default_vocab_size"]
    make(folder, Shape(layers=layers, hidden=32, heads=1, kv_heads=1, mlp=64, vocab=size), num_files=1)
    tokenizer = _tokenizer(described)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.id_to_token(_END)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": _END, "bos_token_id": _END}))
    return folder


def _tokenizer(described: dict[str, Any]) -> Tokenizer:
    config = described["config"]
    num_special = config["default_num_special_tokens"]
    count = config["default_vocab_size"] - num_special
    ranks = {base64.b64decode(one["token_bytes"]): one["rank"] for one in described["vocab"][:count]}
    merges = [pair for token, rank in ranks.items() if len(token) > 1 for pair in [_pair(token, rank, ranks)]]
    special = [f"<SPECIAL_{i}>" for i in range(num_special)]
    ids = {_text(token): rank + num_special for token, rank in ranks.items()} | {s: i for i, s in enumerate(special)}
    made = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True) for one in special])
    return made


def _pair(token: bytes, limit: int, ranks: dict[bytes, int]) -> tuple[str, str]:
    """The two tokens that a token is merged of: what it is split into by those before it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [(ranks.get(a + b, limit), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(joined)
        assert rank < limit
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return _text(parts[0]), _text(parts[1])


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_LETTERS = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


def _text(token: bytes) -> str:
    """A token's bytes as byte-level tokenizers write them."""
    return "".join(_LETTERS[byte] for byte in token)
