"""Reads a picture from a data URL, or from a file in an allowed folder. Nothing is fetched.

A server that fetched addresses could reach places that its clients cannot (its own network, its host's metadata). So
addresses are refused; a client can fetch the picture itself and send the bytes.
"""

import base64
import binascii
from pathlib import Path
from urllib.parse import unquote

from splitinfer.errors import RequestError

_SHOWN = 40  # characters of what was sent


def from_url(url: str, most: int, folder: Path | None = None) -> bytes:
    """Return the bytes of the picture that a URL names. A file larger than ``most`` bytes gives ``most + 1`` bytes.
    ``folder``: files below it may be read.

    Raises:
        RequestError: it is neither a data URL with a picture nor a readable file, or a data URL exceeds ``most``.
    """
    if folder is not None and url[:8].lower() == "file:///":
        return _file(Path(unquote(url[7:])), most, folder)
    if url[:5].lower() != "data:":
        what = "files are not read" if url[:5].lower() == "file:" else "addresses are not fetched"
        raise RequestError(
            f"the picture {url[:_SHOWN]!r} was not read: {what}; send it as a data URL (data:image/png;base64,...)"
        )
    head, comma, body = url[5:].partition(",")
    if not comma or not head.lower().startswith("image/") or not head.lower().endswith(";base64"):
        raise RequestError("a picture's data URL must begin with data:image/TYPE;base64,")
    if len(body) > most * 4 // 3 + 4:
        raise RequestError(f"a picture has more than {most:,} bytes")
    try:
        return base64.b64decode("".join(body.split()), validate=True)  # many tools break its lines
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"a picture is not valid base64 ({error})") from None


def _file(path: Path, most: int, folder: Path) -> bytes:
    """Return the bytes of a file below ``folder``. Other paths get one error, whether a file is there or not."""
    try:
        real = path.resolve()
        if not real.is_relative_to(folder.resolve()) or (real.exists() and not real.is_file()):
            raise RequestError(f"the picture {str(path)[:_SHOWN]!r} is not in a folder that may be read")
        return read_file(real, most)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise RequestError(f"the picture {str(path)[:_SHOWN]!r} cannot be read ({type(error).__name__})") from None


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a file, at most ``most + 1``.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(most + 1)
