"""What a machine tells another about a model: as it was, or refused with a sentence."""

import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from stored import FILE, described

from splitinfer.common.tensor_info import TensorInfo
from splitinfer.errors import ModelError
from splitinfer.weights.manifest import Manifest, SmallFile, is_small_file, is_weight_file, pack, unpack, with_files

HOSTILE = [
    "../config.json", "/etc/config.json", "a/config.json", "a\\config.json", "..", ".", "", ".config.json", "con.json",
    "config.json\0", "config.json\n", "~config.json", "config.json/", "vocab..json", "C:config.json", "tokenizer.py",
    "modeling.py", "config.py", "tokenizer.json.py", "x" * 200 + ".jinja", "credentials.json", "notes.txt", "-x.jinja",
]  # fmt: skip
USUAL = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "tokenizer.model", "qwen.tiktoken",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_other_names(name: str):
    assert not is_small_file(name)
    assert not is_weight_file(name)
    with pytest.raises(ModelError, match="not allowed"):
        replace(described(), files=(SmallFile(name, 3),))
    with pytest.raises(ModelError, match="not allowed"):
        replace(described(), tensors=(TensorInfo("a", "U8", (3,), name, 0, 3),))


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_names(name: str):
    assert is_small_file(name)


def test_a_manifest_comes_back_as_it_was():
    told = described()
    assert unpack(pack(told)) == told
    assert [info.name for info in told.by_file[FILE]] == [f"layers.{at}.weight" for at in range(5)]
    assert told.sizes == {"config.json": told.files[0].nbytes, FILE: told.tensors[-1].end}


def changed(**fields: Any) -> bytes:
    """A packed manifest with other fields."""
    plain = json.loads(zlib.decompress(pack(described())))
    return zlib.compress(json.dumps({**plain, "held": {}, **fields}).encode())


def tensor(name: str, dtype: str, shape: list[int], begin: int, end: int, file: str = FILE) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "file": file, "begin": begin, "end": end}


def small(name: str, nbytes: Any) -> dict[str, Any]:
    return {"name": name, "nbytes": nbytes}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tensors": [tensor("a", "U8", [9], 0, 3)]}, "another size"),
        ({"tensors": [tensor("a", "U8", [2**62], 0, 2**62)]}, "larger than any disk"),
        ({"tensors": [tensor("a", "U8", [1], 2**62, 2**62 + 1)]}, "larger than any disk"),
        ({"tensors": [tensor("a", "F13", [3], 0, 3)]}, "another size"),
        ({"tensors": [tensor("a", "U8", [-1, -3], 0, 3)]}, "another size"),
        ({"tensors": [tensor("a", "U8", [1] * 17, 0, 1)]}, "another size"),
        ({"tensors": [tensor("a", "U8", [1], 0, 1), tensor("a", "U8", [1], 1, 2)]}, "one name"),
        ({"tensors": [tensor("a", "U8", [1], 0, 1), tensor("b", "U8", [1], 0, 1, "Model.safetensors")]}, "one name"),
        ({"tensors": [tensor("a", "U8", [1], 0, 1, "../model.safetensors")]}, "not allowed"),
        ({"tensors": [tensor("a", "U8", [1], 0, 1, "/model.safetensors")]}, "not allowed"),
        ({"files": [small("config.json", 3), small("config.json", 3)]}, "one name"),
        ({"files": [small("tokenizer_A.json", 3), small("tokenizer_a.json", 3)]}, "one name"),
        ({"files": [small("config.json", 2**40)]}, "bytes"),
        ({"files": [small("config.json", -1)]}, "bytes"),
        ({"files": [small("config.json", "3")]}, "cannot be read"),
        ({"files": [small("../config.json", 3)]}, "not allowed"),
        ({"held": {"../x.safetensors": [[0, 1]]}}, "none of its tensors is in that file"),
        ({"held": {FILE: [[0, 2**40]]}}, "not in it"),
        ({"held": {FILE: [[-5, 2]]}}, "not in it"),
        ({"held": {FILE: [[0, 2], [1, 3]]}}, "not in it"),
        ({"model": "a\x1b[2J"}, "cannot be printed"),
        ({"model": ""}, "cannot be printed"),
        ({"format": 9}, "format"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_right(fields: dict[str, Any], why: str):
    with pytest.raises(ModelError, match=why):
        unpack(changed(**fields))


@pytest.mark.parametrize(
    "data", [b"", b"nothing", zlib.compress(b"[" * 100_000), zlib.compress(b"{}"), pack(described())[:-9]]
)
def test_bytes_that_are_none(data: bytes):
    with pytest.raises(ModelError, match=r"cannot be read|too early"):
        unpack(data)


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("splitinfer.weights.manifest._MAX_TEXT", 10_000)
    with pytest.raises(ModelError, match="over 10,000 bytes"):
        unpack(zlib.compress(b" " * 10**6))


def test_a_stage_needs_no_tokenizer():
    files = (SmallFile("config.json", 1), SmallFile("tokenizer.json", 2), SmallFile("generation_config.json", 3))
    told = Manifest("m", described().fingerprint, files, ())
    assert told.small(tokenizer=False) == ["config.json", "generation_config.json"]
    assert len(told.small(tokenizer=True)) == 3


def test_files_that_another_machine_has_besides():
    both = with_files(described(), [SmallFile("tokenizer.json", 9), SmallFile("config.json", 4)])
    assert both.files == (SmallFile("config.json", 4), SmallFile("tokenizer.json", 9))
