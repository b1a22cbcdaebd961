"""The process that decodes one picture: bytes on standard input, RGB on standard output.

It bounds its own memory and processor time before it imports what decodes, refuses a picture by the size in its header
before any pixel of it is read, and answers with one line of JSON: the size of what follows, or what is wrong. Whatever
else happens here (a crash in a library, no memory, no end) is the parent's to notice; nothing of it reaches a model.
"""

import contextlib
import io
import json
import sys
import warnings
from typing import Any

from splitinfer.pictures.sizes import Fit, fitted

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


class NotAPicture(Exception):
    """What is wrong with it, for the person who sent it."""


def _bound(seconds: int, memory: int) -> None:
    """Bound this process's processor time, and its memory where the system can."""
    import resource

    for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS bounds no address space
            resource.setrlimit(kind, (limit, limit))


def decoded(data: bytes, fit: Fit, most_pixels: int) -> tuple[int, int, bytes]:
    """Width, height and RGB bytes of a picture, turned as its camera was held and resized.

    Raises:
        NotAPicture: it cannot be decoded, or is too large.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the bound is ours
    try:
        found = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise NotAPicture(f"it is not a picture in one of the formats {', '.join(_FORMATS)}") from None
    width, height = found.size
    if not 0 < width * height <= most_pixels:
        raise NotAPicture(f"it has {width:,} x {height:,} pixels, more than {most_pixels:,}")
    try:
        turned = ImageOps.exif_transpose(found)
        size = fitted(fit, *turned.size)
        rgb = turned.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    except ValueError as error:
        raise NotAPicture(str(error)) from None
    return (*size, rgb.tobytes())


def answer(data: bytes, asked: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The line of JSON and what follows it."""
    try:
        width, height, rgb = decoded(data, Fit(*asked["fit"]), asked["most_pixels"])
    except NotAPicture as error:
        return {"wrong": str(error)}, b""
    except MemoryError:
        return {"wrong": "it takes too much memory"}, b""
    except Exception as error:  # noqa: BLE001 - Pillow's formats raise anything for damaged files
        return {"wrong": f"it is damaged ({type(error).__name__})"}, b""
    return {"size": [width, height]}, rgb


def main() -> None:
    """Read one question, write one answer."""
    warnings.simplefilter("ignore")
    asked = json.loads(sys.stdin.buffer.readline())
    _bound(asked["seconds"], asked["memory"])
    said, rgb = answer(sys.stdin.buffer.read(), asked)
    sys.stdout.buffer.write(json.dumps(said).encode() + b"\n" + rgb)


if __name__ == "__main__":
    main()
