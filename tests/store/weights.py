"""Models of random bytes for the tests of copying: a checkpoint's folder, and its manifest."""

import json
from pathlib import Path
from random import Random

import pytest

from splitinfer.core.fingerprint import FileFingerprint, Fingerprint
from splitinfer.core.tensor_info import TensorInfo
from splitinfer.store import parts, pieces
from splitinfer.store.manifest import Manifest, SmallFile, manifest
from splitinfer.store.parts import header_of
from splitinfer.store.source import Place, Source

SIZES = (10, 25, 7, 0, 40)  # of tensors, in bytes
CONFIG = json.dumps({"model_type": "none", "num_hidden_layers": 4}).encode()


def shorten_pieces(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Pieces so short that small tensors have several."""
    for module in (pieces, parts):
        monkeypatch.setattr(module, "PIECE", nbytes)


def tensors(sizes: tuple[int, ...], file: str = "model.safetensors") -> list[TensorInfo]:
    """Tensors of these sizes in bytes, one behind the other."""
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [
        TensorInfo(f"layers.{at}.weight", "U8", (size,), file, end - size, end)
        for at, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def described(sizes: tuple[int, ...] = SIZES, *, sample: str = "s", model: str = "a/model") -> Manifest:
    """A manifest with all items held."""
    infos = tensors(sizes)
    print_ = Fingerprint("c", {"model.safetensors": FileFingerprint(sum(sizes), "t", sample)})
    names = ["config.json", *(info.name for info in infos)]
    return manifest(model, print_, [SmallFile("config.json", len(CONFIG))], infos, names)


def written(folder: Path, told: Manifest, seed: int = 0) -> Source:
    """The model in a folder, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(CONFIG)
    header = header_of(told.tensors)
    path = folder / "model.safetensors"
    path.write_bytes(header + Random(seed).randbytes(sum(info.nbytes for info in told.tensors)))
    places = {told.number_of[info.name]: Place(path, len(header) + info.begin) for info in told.tensors}
    return Source(told, {0: Place(folder / "config.json"), **places})


def bytes_in(path: Path, name: str) -> bytes:
    """A tensor's bytes in a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return data[8 + length + begin : 8 + length + end]
