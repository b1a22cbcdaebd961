"""Where a picture may come from: a data URL, or a file below a folder that was named. Nothing is fetched.

A server that fetched addresses would reach what its clients cannot (its own network, its host's metadata), so an
address is refused; whoever wants one fetches it and sends the bytes.
"""

import base64
import binascii
from pathlib import Path
from urllib.parse import unquote

from splitinfer.errors import RequestError

_SHOWN = 40  # characters of what was sent


def from_url(url: str, most: int, folder: Path | None = None) -> bytes:
    """Return the bytes of the picture that a URL names, of which at most ``most`` are read, or one more of a file.
    ``folder``: below which files may be read.

    Raises:
        RequestError: it is no data URL with a picture and no file that may be read, or the picture is larger.
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
    """Return what lies elsewhere is refused in one way, whether it is there or not."""
    try:
        real = path.resolve()
        if not real.is_relative_to(folder.resolve()) or (real.exists() and not real.is_file()):
            raise RequestError(f"the picture {str(path)[:_SHOWN]!r} is in no folder that may be read")
        return read_file(real, most)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise RequestError(f"the picture {str(path)[:_SHOWN]!r} cannot be read ({type(error).__name__})") from None


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a file, one more than ``most`` at the most.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(most + 1)
