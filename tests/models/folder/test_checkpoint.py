"""What is read of a folder without reading a weight, and what is said of folders that are none."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import Folder

from splitinfer.errors import ModelError
from splitinfer.models.folder.checkpoint import Checkpoint, open_folder, read_header
from splitinfer.models.folder.hub import open_model

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tiny_folder: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "llama"))


def error_of(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_folder(folder)
    return str(caught.value)


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_the_tables_are_what_mlx_loads(tiny_folder: Folder):
    folder = tiny_folder("llama", bits=4)
    checkpoint = open_folder(folder)
    loaded = {name: (file, a) for file in checkpoint.files for name, a in mx.load(str(folder / file)).items()}
    assert set(checkpoint.tensors) == set(loaded)
    for name, info in checkpoint.tensors.items():
        file, array = loaded[name]
        assert (info.name, info.file, info.shape, info.nbytes) == (name, file, array.shape, array.nbytes)
    assert checkpoint.files == [FIRST, SECOND]
    assert checkpoint.config["model_type"] == "llama"


def test_metadata_is_no_tensor_and_scalars_and_empty_ones_are(tmp_path: Path):
    header = {
        "__metadata__": {"format": "mlx"},
        "scalar": entry(shape=[], offsets=[0, 4]),
        "empty": entry(shape=[0, 3], offsets=[4, 4]),
    }
    found = read_header(write(tmp_path / "a.safetensors", header, bytes(4)))
    assert [(info.name, info.nbytes) for info in found] == [("scalar", 4), ("empty", 0)]


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 128, "text_config": {"max_position_embeddings": 512}}, 128),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 0}, 2**20),
        ({"text_config": None}, 2**20),
    ],
)
def test_context_length(config: dict[str, Any], length: int):
    assert Checkpoint(Path(), config, {}).context_length == length


def test_no_folder(tmp_path: Path):
    assert error_of(tmp_path / "gone") == f"there is no model folder {tmp_path / 'gone'}"


def test_no_config(folder: Path):
    (folder / "config.json").unlink()
    assert error_of(folder) == f"{folder} contains no config.json, so it is not a model folder"


_UNREADABLE, _NO_TYPE = "cannot be read (", "lacks the model's type (model_type)"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, _UNREADABLE) for text in (b"", b"{", b"\xff\xfe", b"[" * 100_000)),
        *((text, _NO_TYPE) for text in (b"[]", b"{}", b'"llama"', b"null")),
    ],
)
def test_a_config_that_is_none(folder: Path, text: bytes, reason: str):
    (folder / "config.json").write_bytes(text)
    assert error_of(folder).startswith(f"{folder / 'config.json'} {reason}")


def test_no_weights(folder: Path):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "other.safetensors").write_bytes(b"x")
    assert error_of(folder) == f"{folder} contains no weights (model*.safetensors)"


@pytest.mark.parametrize("named", ["", "model.gguf"])
def test_a_model_in_gguf(named: str, tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"has a model in GGUF, and MLX reads safetensors: .*mlx_lm.convert"):
        open_model(str(tmp_path / named))


def test_a_file_that_is_cut_short_says_by_how_much(folder: Path):
    path = folder / SECOND
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    there, wanted = len(whole) - 1, len(whole)
    assert error_of(folder) == (
        f"{path} is cut short: {there:,} of {wanted:,} bytes; delete it and download it again"
    )  # fmt: skip


@pytest.mark.parametrize("kept", [5, 100])
def test_a_file_without_its_whole_header(folder: Path, kept: int):
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:kept])
    assert error_of(folder).startswith(f"{path} is damaged or not a safetensors file (")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[" * 100_000,
        [],
        {"a": None},
        {"a": {}},
        {"a": entry(dtype=["F32"])},
        {"a": entry(shape=["2", "3"])},
        {"a": entry(shape=[-2, -3])},
        {"a": entry(offsets="ab")},
        {"a": entry(offsets=[0, "24"])},
        {"a": entry(offsets=[0, 20])},
        {"a": entry(offsets=[24, 0])},
        {"a": entry(shape=[2, 4])},
        {"a": entry(dtype="F16")},
    ],
)
def test_headers_that_are_none(tmp_path: Path, header: Any):
    path = write(tmp_path / "model.safetensors", header, bytes(24))
    with pytest.raises(ModelError, match=r"model.safetensors is damaged or not a safetensors file"):
        read_header(path)


@pytest.mark.parametrize("dtype", ["C64", "float32"])
def test_a_dtype_that_mlx_does_not_load_is_named(tmp_path: Path, dtype: str):
    path = write(tmp_path / "model.safetensors", {"layers.0.w": entry(dtype=dtype)}, bytes(24))
    with pytest.raises(ModelError, match=f"model.safetensors holds layers.0.w as {dtype}, which MLX does not load"):
        read_header(path)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def difference(a: Path, b: Path) -> str | None:
    return open_folder(a).fingerprint().difference(open_folder(b).fingerprint())


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda config: config, None),
        (lambda config: dict(reversed(config.items())), None),
        (lambda config: {**config, "rope_theta": 500_000.0}, "config.json differs"),
    ],
    ids=["a copy", "another order", "another value"],
)
def test_another_configuration_is_another_model(
    folder: Path, tiny_folder: Folder, change: Callable[[dict[str, Any]], dict[str, Any]], differs: str | None
):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config), indent=4))
    assert difference(folder, tiny_folder("llama")) == differs


@pytest.mark.parametrize("size", [1, 4096, 4127, 200_030])
def test_samples_reach_from_the_first_byte_to_the_last(tmp_path: Path, size: int):
    def model(name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "x"}')
        header = {"a": entry("U8", [size], [0, size])}
        write(tmp_path / name / "model.safetensors", header, bytes(size))
        return tmp_path / name

    here, there = model("here"), model("there")
    file = there / "model.safetensors"
    whole = file.stat().st_size
    assert difference(here, there) is None
    spots = {whole - size, whole - 1, max(whole - 30, whole - size)}
    for spot in spots:
        flip(file, spot)
        assert difference(here, there) == "model.safetensors has different weights", f"byte {spot} of {whole}"
        flip(file, spot)
    assert difference(here, there) is None
