"""What strangers send as pictures: decoded within limits in another process, or refused in a sentence."""

import io
import struct
import zlib
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from PIL import Image
from seeing import png

from splitinfer.errors import RequestError
from splitinfer.pictures import decoding
from splitinfer.pictures.decoder import NotAPicture, decoded
from splitinfer.pictures.decoding import Limits, decode
from splitinfer.pictures.families import Family
from splitinfer.pictures.sizes import Fit, fitted

FIT = Fit("area", 8, 64, 10_000)


def bomb(width: int, height: int) -> bytes:
    """A small PNG that says it is large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_a_picture_comes_back_in_its_size() -> None:
    rgb = decode(png(60, 30), FIT, Limits())
    assert rgb.shape == (32, 64, 3) or rgb.shape[:2] == fitted(FIT, 60, 30)[::-1]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (bomb(60_000, 60_000), "60,000 x 60,000 pixels, more than"),
        (bomb(5000, 5000), "it is damaged"),
        (png()[:-40], "it is damaged"),
        (b"GIF89a", "not a picture|damaged"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not a picture"),
        (b"", "not a picture"),
        (png(4, 900), "times as long as wide"),
    ],
)
def test_what_is_wrong_is_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(NotAPicture) if sentence != "it is damaged" else pytest.raises((NotAPicture, OSError)):
        decoded(data, FIT, Limits().pixels)
    if "damaged" in sentence:
        with pytest.raises(RequestError, match=sentence):
            decode(data, FIT, Limits())


def test_bytes_memory_and_a_decoder_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="at most 100 are read"):
        decode(png(), FIT, Limits(nbytes=100))
    with pytest.raises(RequestError, match="cannot be used"):
        decode(bomb(7000, 7000), FIT, Limits(memory=150 * 2**20))
    monkeypatch.setattr(decoding.sys, "executable", "/bin/false")
    with pytest.raises(RequestError, match="its decoder failed"):
        decode(png(), FIT, Limits())
    monkeypatch.setattr(decoding.sys, "executable", "/bin/sleep")
    monkeypatch.setattr(decoding, "_COMMAND", ["5"])
    with pytest.raises(RequestError, match=r"more than 0\.1 seconds"):
        decode(png(), FIT, Limits(seconds=0.1))  # type: ignore[arg-type]


def _family(name: str, fit: Fit, patch: int, merge: int) -> Family:
    return Family(name, 1, "", fit, patch, merge, (0.5,) * 3, (0.5,) * 3, {"break": 2, "end": 3, "begin": 4})


def test_values_are_those_of_mlx_vlms_processors() -> None:
    from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

    for size in ((90, 50), (30, 200), (700, 400)):
        file = png(*size)
        image = Image.open(io.BytesIO(file))
        theirs = Qwen3VLImageProcessor(patch_size=16, merge_size=2, min_pixels=4096, max_pixels=65536)([image])
        fit = Fit("area", 32, 4096, 65536)
        width, height, rgb = decoded(file, fit, 10**6)
        own = _family("qwen", fit, 16, 2).prepared(np.frombuffer(rgb, np.uint8).reshape(height, width, 3))
        np.testing.assert_allclose(own.values, theirs["pixel_values"], atol=1e-6)
        assert own.named["image_grid_thw"].tolist() == theirs["image_grid_thw"].tolist()
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        other = PixtralImageProcessor(size={"longest_edge": 256}, patch_size=28, **half)(image)
        fit = Fit("longest", 28, 0, 256)
        width, height, rgb = decoded(file, fit, 10**6)
        own = _family("pixtral", fit, 14, 2).prepared(np.frombuffer(rgb, np.uint8).reshape(height, width, 3))
        np.testing.assert_allclose(own.values, other["pixel_values"], atol=1e-6)
        assert own.named["image_sizes"] == other["image_sizes"]
