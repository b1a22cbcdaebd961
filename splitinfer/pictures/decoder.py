"""The process that decodes one picture: bytes on standard input, RGB on standard output.

It bounds its own memory, processor time and files before it imports the decoder. It checks the size in the picture's
header, and the size for the model, before it reads any pixel. It answers with one line of JSON: the size of the bytes
that follow, or an error. The parent notices any other trouble (a crash in a library, no memory, no end); nothing
of it reaches a model.
"""

import contextlib
import io
import json
import sys
import warnings
from typing import Any

from splitinfer.pictures.sizes import Fit, fitted

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112  # of Exif
_TURNED = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")


class NotAPicture(Exception):
    """The bytes are not a usable picture. The text tells the sender why."""


class TooLarge(Exception):
    """The picture, in the size for the model, needs more room than there is."""


def _bound(seconds: int, memory: int) -> None:
    """Limit this process's processor time, its memory if the system can, and forbid it to write files."""
    import resource

    of_files = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0))
    for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), *of_files):
        with contextlib.suppress(ValueError, OSError):  # macOS bounds no address space
            resource.setrlimit(kind, (limit, limit))


def decoded(data: bytes, fit: Fit, most_pixels: int, room: int = 1 << 62) -> tuple[int, int, bytes]:
    """Return width, height and RGB bytes of a picture, turned upright and resized. ``room``: the most pixels that it
    may then have.

    Raises:
        NotAPicture: it cannot be decoded or is too large.
        TooLarge: there is no room for it.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the bound is ours
    try:
        found = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise NotAPicture(f"it is not a picture in one of the formats {', '.join(_FORMATS)}") from None
    width, height = found.size
    if width * height > most_pixels:
        raise NotAPicture(f"it has {width:,} x {height:,} pixels, more than {most_pixels:,}")
    try:
        size = fitted(fit, width, height)
        if size[0] * size[1] > room:
            raise TooLarge
        turned = _turned(found)
        size = fitted(fit, *turned.size)
        rgb = _opaque(turned).resize(size, Image.Resampling.BICUBIC)
    except ValueError as error:
        raise NotAPicture(str(error)) from None
    return (*size, rgb.tobytes())


def _turned(image: Any) -> Any:
    """Return a picture turned upright, if its notes (Exif) give a legible orientation."""
    from PIL import Image

    with contextlib.suppress(Exception):  # damaged notes do not damage the pixels
        way = image.getexif().get(_ORIENTATION)
        if isinstance(way, int) and 2 <= way <= 8:
            return image.transpose(Image.Transpose[_TURNED[way - 2]])
    return image


def _opaque(image: Any) -> Any:
    """Return a picture in RGB: transparent parts on white, as on a page; 16 bits per pixel become 8."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = image.point(lambda value: value / 256).convert("L") if image.mode == "I" else _high_bytes(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")


def _high_bytes(image: Any) -> Any:
    """Return a picture of the upper 8 of each pixel's 16 bits."""
    from PIL import Image

    little = image.mode != "I;16B"
    return Image.frombytes("L", image.size, image.tobytes()[1 if little else 0 :: 2])


def answer(data: bytes, asked: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    try:
        width, height, rgb = decoded(data, Fit(*asked["fit"]), asked["most_pixels"], asked["room"])
    except TooLarge:
        return {"too_large": True}, b""
    except NotAPicture as error:
        return {"wrong": str(error)}, b""
    except MemoryError:
        return {"wrong": "it takes too much memory"}, b""
    except Exception as error:  # noqa: BLE001 - Pillow's formats raise anything for damaged files
        return {"wrong": f"it is damaged ({type(error).__name__})"}, b""
    return {"size": [width, height]}, rgb


def main() -> None:
    warnings.simplefilter("ignore")
    asked = json.loads(sys.stdin.buffer.readline())
    _bound(asked["seconds"], asked["memory"])
    said, rgb = answer(sys.stdin.buffer.read(), asked)
    sys.stdout.buffer.write(json.dumps(said).encode() + b"\n" + rgb)


if __name__ == "__main__":
    main()
