"""What strangers send as pictures: decoded within limits in another process, or refused in a sentence."""

import base64
import io
import os
import struct
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from PIL import Image, ImageOps
from seeing import png

from splitinfer.errors import ContextExceeded, RequestError
from splitinfer.pictures import decoding
from splitinfer.pictures.decoder import NotAPicture, decoded
from splitinfer.pictures.decoding import Limits, decode
from splitinfer.pictures.families import Family
from splitinfer.pictures.sizes import Fit, fitted
from splitinfer.pictures.sources import from_url

FIT = Fit("area", 8, 64, 10_000)


def bomb(width: int, height: int) -> bytes:
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
        (struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, 0, 4, 1, 24, 0, 0, 0, 0, 0, 0), "not a picture"),
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


def _file(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _colours(data: bytes) -> list[tuple[int, ...]]:
    """The colours in the middle of a picture's left and right halves."""
    width, height, rgb = decoded(data, FIT, Limits().pixels)
    seen = np.frombuffer(rgb, np.uint8).reshape(height, width, 3)
    return [tuple(seen[height // 2, width * i // 4].tolist()) for i in (1, 3)]


def test_what_is_seen_is_what_a_person_sees() -> None:
    clear = Image.new("RGBA", (40, 20), (0, 0, 0, 0))
    clear.paste((200, 0, 0, 255), (20, 0, 40, 20))
    assert _colours(_file(clear, "PNG")) == [(255, 255, 255), (200, 0, 0)]
    palette = Image.new("P", (40, 20), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert _colours(_file(palette, "PNG", transparency=0)) == [(255, 255, 255)] * 2
    assert _colours(_file(Image.new("I;16", (40, 20), 128 * 256), "PNG")) == [(128, 128, 128)] * 2
    assert _colours(_file(Image.new("CMYK", (40, 20), (0, 0, 0, 255)), "JPEG")) == [(0, 0, 0)] * 2
    films = [Image.new("RGB", (40, 20), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        red, _ = _colours(_file(films[0], kind, save_all=True, append_images=films[1:], lossless=True))
        assert red == (255, 0, 0), kind


@pytest.mark.parametrize("way", [3, 6, 8])
def test_it_is_turned_as_the_camera_was_held(way: int) -> None:
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = way
    data = _file(image, "PNG", exif=exif)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    width, height, rgb = decoded(data, FIT, Limits().pixels)
    assert (width > height) == (turned.width > turned.height)
    seen = Image.frombytes("RGB", (width, height), rgb)
    for x, y in ((0, 0), (-1, -1)):
        assert seen.getpixel((x % width, y % height)) == turned.getpixel((x % turned.width, y % turned.height))
    assert decoded(_file(image, "JPEG", exif=b"Exif\0\0broken"), FIT, Limits().pixels)[:2] == fitted(FIT, 40, 20)


def test_there_is_room_before_it_is_decoded() -> None:
    size = fitted(FIT, 60, 30)
    assert decode(png(60, 30), FIT, Limits(), size[0] * size[1]).shape == (*size[::-1], 3)
    for data in (png(60, 30), bomb(60, 30)):  # the second one's pixels are damaged, which nobody sees
        with pytest.raises(ContextExceeded, match="need more tokens than the context has"):
            decode(data, FIT, Limits(), size[0] * size[1] - 1)


def test_an_answer_that_is_cut_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding.sys, "executable", "/bin/sh")
    for script in ("echo '{\"size\": [8, 8]}'; exit 1", "echo no JSON", "echo '{\"size\": [8, 8]}'; echo short"):
        monkeypatch.setattr(decoding, "_COMMAND", ["-c", f"cat > /dev/null; {script}"])
        with pytest.raises(RequestError, match="its decoder failed"):
            decode(png(), FIT, Limits())


@pytest.mark.parametrize(
    "url", ["http://[::1/a.png", "http://a\u2100b/", "http://[", "//[x", "data:", "file://[/", "\0"]
)
def test_what_is_no_url_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"was not read|must begin with"):
        from_url(url, 100, tmp_path)


def test_lines_of_base64_may_be_broken() -> None:
    lines = base64.encodebytes(png()).decode()
    assert from_url(f"data:image/png;base64,{lines}", 10**6) == png()


def test_nobody_learns_which_files_there_are(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    (tmp_path / "there.png").write_bytes(png())
    (folder / "circle.png").symlink_to(folder / "circle.png")
    os.mkfifo(folder / "pipe.png")
    said = set()
    for name in ("../there.png", "../none.png", "../open2/a/b.png", "pipe.png"):
        with pytest.raises(RequestError) as error:
            from_url(f"file://{folder}/{name}", 10**6, folder)
        said.add(str(error.value).split("' ")[-1])
    assert said == {"is not in a folder that may be read"}
    with pytest.raises(RequestError, match="cannot be read"):
        from_url(f"file://{folder}/circle.png", 10**6, folder)


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
