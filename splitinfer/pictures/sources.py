"""Where a picture may come from: a data URL. Nothing is fetched.

A server that fetched addresses would reach what its clients cannot (its own network, its host's metadata), so an
address is refused; whoever wants one fetches it and sends the bytes.
"""

import base64
import binascii

from splitinfer.errors import RequestError

_SHOWN = 40  # characters of what was sent


def from_url(url: str, most: int) -> bytes:
    """Bytes of the picture in a data URL, of which at most ``most`` are read.

    Raises:
        RequestError: it is no data URL with a picture, or the picture is larger.
    """
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
