"""Writes down what a client sends: a server that passes everything on, and keeps each request's body in a file.

    python -m tests.campaigns.clients.recorder http://127.0.0.1:8080 FOLDER      says where it is, until Ctrl-C

`shape` makes of a body what can be published: its keys and the sizes of its texts, and nothing of what they say.
"""

import http.client
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_WORDS = 24  # characters of a text that is a word of the API rather than somebody's
_HOP = ("connection", "keep-alive", "transfer-encoding", "host", "content-length")


@contextmanager
def recording(url: str, folder: Path) -> Iterator[str]:
    """A server in front of another. ``url``: of that one; the new one's is yielded."""
    folder.mkdir(parents=True, exist_ok=True)
    there, numbers = urlsplit(url), itertools.count()

    class Passing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            number = next(numbers)
            record = {"method": self.command, "path": self.path, "headers": sorted(headers), "body": _read(raw)}
            asked = http.client.HTTPConnection(there.hostname or "", there.port, timeout=600)
            try:
                asked.request(self.command, self.path, raw or None, {**headers, "Host": there.netloc})
                answer = asked.getresponse()
                self._answer(answer, record)
            finally:
                asked.close()
                (folder / f"{number:03}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")

        def _answer(self, answer: http.client.HTTPResponse, record: dict[str, Any]) -> None:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            kept = b""
            while piece := answer.read1(65536):
                kept += piece
                self.wfile.write(piece)
                self.wfile.flush()
            record |= {"status": answer.status, "answer": kept.decode("utf-8", "replace")}

        do_GET = do_POST = do_DELETE = do_HEAD = do_OPTIONS = _pass_on  # noqa: N815 - the library's names

        def log_message(self, *_args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="recorder", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _read(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return raw.decode("utf-8", "replace")


def shape(value: Any) -> Any:
    """A body without what it says: texts as their length, lists of one shape as one of them and their number."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        shapes = [shape(one) for one in value]
        different = [one for i, one in enumerate(shapes) if one not in shapes[:i]]
        return [*different, f"... {len(shapes)} in all"] if len(different) < len(shapes) else different
    if isinstance(value, str) and (len(value) > _WORDS or " " in value):
        return f"<{len(value)} characters>"
    return value


def main() -> None:
    """Record until Ctrl-C."""
    with recording(sys.argv[1], Path(sys.argv[2])) as url:
        print(url, flush=True)
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
