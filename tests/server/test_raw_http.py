"""The reader of answers by which damaged requests are judged reads every way in which they are framed."""

import pytest
from raw_http import AnswerReader, Said

HEAD = b"HTTP/1.1 200 OK\r\nX-Request-Id: r\r\n"


def read(raw: bytes, size: int, *, has_bodies: bool = True) -> tuple[list[Said], bytes]:
    """The answers in a connection's bytes, which come ``size`` at a time; and what is left."""
    reader = AnswerReader()
    reader.has_bodies = has_bodies
    found = [said for i in range(0, len(raw), size) for said in reader.feed(raw[i : i + size])]
    return found + reader.feed(b""), reader.rest


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_every_framing(size: int):
    counted = HEAD + b"Content-Length: 3\r\n\r\nabc"
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    goes_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    nothing = b"HTTP/1.1 204 No Content\r\n\r\n"
    to_the_end = HEAD + b"Connection: close\r\n\r\nabc"
    found, rest = read(counted + chunked + goes_on + nothing + to_the_end, size)
    assert [said.body for said in found] == [b"abc", b"abc", b"", b"abc"]
    assert [said.status for said in found] == [200, 200, 204, 200]
    assert rest == b""


def test_what_is_not_whole_is_left():
    for raw in (HEAD, HEAD + b"Content-Length: 3\r\n\r\nab", HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"):
        assert read(raw, 5) == ([], raw)
    found, rest = read(HEAD + b"Content-Length: 3\r\n\r\n" + HEAD, 9, has_bodies=False)
    assert ([said.body for said in found], rest) == ([b""], HEAD)
    with pytest.raises(ValueError, match="it answered"):
        read(b"SSH-2.0 hello\r\n\r\n", 99)
