"""Where a picture may come from: a data URL, or a file below folders that the operator names. Nothing is fetched.

A server that fetched addresses would reach what its clients cannot (its own network, its host's metadata), so an
address is refused; whoever wants one fetches it and sends the bytes.
"""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from splitinfer.errors import RequestError

_SHOWN = 40  # characters of what was sent


def from_base64(text: str, most: int) -> bytes:
    """Bytes of a picture in base64, of which at most ``most`` are read.

    Raises:
        RequestError: it is not base64, or longer.
    """
    if len(text) > most * 4 // 3 + 4:
        raise RequestError(f"a picture has more than {most:,} bytes")
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # many tools break its lines
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"a picture is not valid base64 ({error})") from None


def from_url(url: str, most: int, folders: Sequence[Path] = ()) -> bytes:
    """Bytes of the picture that a URL names. ``folders``: below which files may be read.

    Raises:
        RequestError: it is no data URL with a picture, and no file that may be read.
    """
    if url[:5].lower() == "data:":
        head, comma, body = url[5:].partition(",")
        if not comma or not head.lower().startswith("image/") or not head.lower().endswith(";base64"):
            raise RequestError("a picture's data URL must begin with data:image/TYPE;base64,")
        return from_base64(body, most)
    parts = _parts(url)
    if parts.scheme.lower() == "file" and not parts.netloc and folders:
        return _file(Path(unquote(parts.path)), most, folders)
    what = "files are not read" if parts.scheme.lower() == "file" else "addresses are not fetched"
    raise RequestError(
        f"the picture {url[:_SHOWN]!r} was not read: {what}; send it as a data URL (data:image/png;base64,...)"
    )


def _parts(url: str) -> SplitResult:
    """The parts of a URL; all are empty if it is not one."""
    try:
        return urlsplit(url if url.isprintable() else "")
    except ValueError:  # such as brackets without an address
        return urlsplit("")


def _file(path: Path, most: int, folders: Sequence[Path]) -> bytes:
    """What lies elsewhere is refused in one way, whether it is there or not."""
    try:
        real = path.resolve()
        if not any(real.is_relative_to(folder.resolve()) for folder in folders) or (
            real.exists() and not real.is_file()
        ):
            raise RequestError(f"the picture {str(path)[:_SHOWN]!r} is in no folder that may be read")
        return read_file(real, most)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise RequestError(f"the picture {str(path)[:_SHOWN]!r} cannot be read ({type(error).__name__})") from None


def read_file(path: Path, most: int) -> bytes:
    """The bytes of a file, one more than ``most`` at the most.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(most + 1)
