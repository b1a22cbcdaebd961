"""The process that decodes one picture: bytes on standard input, RGB on standard output.

It bounds its own memory, processor time and files before it imports what decodes, refuses a picture by the size in its
header (what it has, and what it would have for the model) before any pixel of it is read, and answers with one line of
JSON: the size of what follows, or what is wrong. Whatever else happens here (a crash in a library, no memory, no end)
is the parent's to notice; nothing of it reaches a model.
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
    """What is wrong with it, for the person who sent it."""


class TooLarge(Exception):
    """The model would get more of it than there is room for."""


def _bound(seconds: int, memory: int) -> None:
    """Bound this process's processor time, and its memory where the system can; it writes no file."""
    import resource

    of_files = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0))
    for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), *of_files):
        with contextlib.suppress(ValueError, OSError):  # macOS bounds no address space
            resource.setrlimit(kind, (limit, limit))


def decoded(data: bytes, fit: Fit, most_pixels: int, room: int = 1 << 62) -> tuple[int, int, bytes]:
    """Return width, height and RGB bytes of a picture, turned as its camera was held and resized. ``room``: the most
    pixels that it may then have.

    Raises:
        NotAPicture: it cannot be decoded, or is too large.
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
    """Return a picture as its camera was held, if it says so legibly."""
    from PIL import Image

    with contextlib.suppress(Exception):  # notes that are damaged damage no pixels
        way = image.getexif().get(_ORIENTATION)
        if isinstance(way, int) and 2 <= way <= 8:
            return image.transpose(Image.Transpose[_TURNED[way - 2]])
    return image


def _opaque(image: Any) -> Any:
    """Return a picture in RGB: what can be seen through is on white, as on a page; 16 bits for a pixel become 8."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = image.point(lambda value: value / 256).convert("L") if image.mode == "I" else _high_bytes(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")


def _high_bytes(image: Any) -> Any:
    """Return the upper halves of 16 bits for each pixel."""
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
