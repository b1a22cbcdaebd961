"""Models of random bytes for the tests of copying: a checkpoint's folder, and its manifest."""

import json
from pathlib import Path
from random import Random

from splitinfer.common.fingerprint import FileFingerprint, Fingerprint
from splitinfer.common.tensor_info import TensorInfo
from splitinfer.weights.copied_file import header_of, write_whole
from splitinfer.weights.manifest import Manifest, SmallFile
from splitinfer.weights.models import ModelStore, StoredModel
from splitinfer.weights.ranges import PIECE, Span, missing, pieces
from splitinfer.weights.source import Place, Source

FILE = "model.safetensors"
SIZES = (10, 2 * PIECE + 5, 7, 0, 3 * PIECE)  # of tensors, in bytes
TOTAL = sum(SIZES)
CONFIG = json.dumps({"model_type": "none", "num_hidden_layers": 4}).encode()


def tensors(sizes: tuple[int, ...], file: str = FILE) -> tuple[TensorInfo, ...]:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return tuple(
        TensorInfo(f"layers.{at}.weight", "U8", (size,), file, end - size, end)
        for at, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


def described(sizes: tuple[int, ...] = SIZES, *, sample: str = "s", model: str = "a/model") -> Manifest:
    print_ = Fingerprint("c", {FILE: FileFingerprint(sum(sizes), "t", sample)})
    files, held = (SmallFile("config.json", len(CONFIG)),), {FILE: ((0, sum(sizes)),)}
    return Manifest(model, print_, files, tensors(sizes), held)


def written(folder: Path, told: Manifest) -> Source:
    """The model in a folder, with random weights; those that are there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(CONFIG)
    header = header_of(told.tensors)
    if not (folder / FILE).exists():
        (folder / FILE).write_bytes(header + Random(0).randbytes(told.sizes[FILE]))
    return Source(told, {"config.json": Place(folder / "config.json"), FILE: Place(folder / FILE, len(header))})


def copied(store: ModelStore, folder: Path, *numbers: int, sample: str = "s") -> StoredModel:
    """The model from a folder as it is in a store; some of its tensors, or all."""
    told = described(sample=sample)
    source, model = written(folder, told), store.begin(told)
    write_whole(model.folder, "config.json", CONFIG)
    with model.open(FILE) as file:
        for begin, end in pieces(missing(spans_of(told, *numbers or range(len(SIZES))), file.here)):
            file.write(begin, source.read(FILE, begin, end))
        file.finish()
    return model


def spans_of(told: Manifest, *numbers: int) -> list[Span]:
    return [(told.tensors[at].begin, told.tensors[at].end) for at in numbers]


def bytes_in(path: Path, name: str) -> bytes:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return data[8 + length + begin : 8 + length + end]
