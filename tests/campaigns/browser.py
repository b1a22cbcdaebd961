"""A hostile page in a real browser against a server on this machine: it reads nothing, and nothing reaches the engine.

    python -m tests.campaigns.browser                     # needs chromium, Debian's for example
    python -m tests.campaigns.browser --chromium PATH

The page (``hostile.html``) comes from another origin and tries what pages can: fetch in all modes, forms, images,
scripts, frames, beacons, EventSource, WebSocket, workers; at each of the server's names. Four servers:

    open        without keys
    session     with keys, and the browser holds a session that a key has bought
    rebound     the page's own name becomes the server's (DNS rebinding): its host first sends the page, and from then
                on passes every connection on to the server, which so is of the page's own origin
    control     with `--cors` for the page: here it must get through, or the page tries nothing

Another control: with the session, the browser itself (its address bar) reads `/v1/models`.
"""

import argparse
import contextlib
import json
import logging
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stages import pipeline

from splitinfer.demo import TARGET
from splitinfer.llm import LLM
from splitinfer.server.gate import Gate, cookie
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PAGE = Path(__file__).parent / "hostile.html"
_ATTACKER, _REBOUND = "attacker.example", "rebound.example"
_SECONDS = 180.0
_REFUSAL = "this server is not called"  # what a page of a rebound name reads, as it is of the same origin
_USER = ApiKey("laptop", digest("bought with this"))


@dataclass
class Counts:
    """What reached the engine, and what the server answered."""

    reached: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def counting(counts: Counts) -> Iterator[None]:
    """Count each use of the engine and the tokenizer, and each line of the access log."""
    names = ("_submit", "encode", "encode_chat", "render_chat", "decode")
    kept = {name: getattr(LLM, name) for name in names}

    def counted(name: str) -> Any:
        def call(self: LLM, *args: Any, **more: Any) -> Any:
            counts.reached[name] += 1
            return kept[name](self, *args, **more)

        return call

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (found := re.search(r"request \S+ \S+ (\S+) \S+ (\d+)", record.getMessage())) is not None:
                counts.statuses[f"{found[1]} {found[2]}"] += 1

    log, handler = logging.getLogger("splitinfer.server.guard"), Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    for name in names:
        setattr(LLM, name, counted(name))
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(LLM, name, method)
        log.removeHandler(handler)


class Site:
    """Another site: serves the page and takes its report. It can set a cookie for this machine: they know no port."""

    def __init__(self, set_cookie: str = "") -> None:
        self.page, self.reported = b"", threading.Event()
        self.report: list[dict[str, str]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(site.page, "text/html")

            def do_POST(self) -> None:
                site.report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._say(b"", "text/plain")
                site.reported.set()

            def _say(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Access-Control-Allow-Origin", "*")
                self.send_header("Connection", "close")
                if set_cookie:
                    self.send_header("Set-Cookie", set_cookie)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def tries(self, targets: list[str]) -> None:
        """What its page tries."""
        page = _PAGE.read_text().replace("TARGETS", json.dumps(targets).replace('"', '\\"'))
        self.page = page.replace("REPORT", f"http://{_ATTACKER}:{self.port}/report").encode()
        self.reported.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Rebinding:
    """A host whose name points elsewhere after the page has come: connections are passed on from then on."""

    def __init__(self, site: Site, server_port: int) -> None:
        self._site, self._server_port = site, server_port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._is_rebound = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            first = client.recv(65536)
            is_page = first.startswith(b"GET / ")
            port = self._site.port if is_page else self._server_port
            up = socket.create_connection(("127.0.0.1", port))
            up.sendall(first)
            threading.Thread(target=_pass, args=(client, up), daemon=True).start()
            _pass(up, client)

    def close(self) -> None:
        self._socket.close()


def _pass(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class Browser:
    """Chromium without a window, with one profile."""

    def __init__(self, path: str, profile: str) -> None:
        rules = f"MAP {_ATTACKER} 127.0.0.1, MAP {_REBOUND} 127.0.0.1"
        self._command = [
            path, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
            "--disable-background-networking", f"--user-data-dir={profile}", f"--host-resolver-rules={rules}",
        ]  # fmt: skip

    def reads(self, url: str) -> str:
        """What its window would show."""
        done = subprocess.run([*self._command, "--dump-dom", url], capture_output=True, timeout=_SECONDS, check=False)
        return done.stdout.decode(errors="replace")

    def opens(self, url: str, until: threading.Event) -> None:
        """Stay on a page until it has reported."""
        running = subprocess.Popen(
            [*self._command, "--remote-debugging-port=0", url], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            if not until.wait(_SECONDS):
                raise TimeoutError(f"the page at {url} did not report within {_SECONDS:g} s")
        finally:
            running.terminate()
            running.communicate(timeout=30)


def attack(
    name: str, browser: Browser, site: Site, url: str, targets: list[str], counts: Counts
) -> tuple[list[str], list[str]]:
    """Let the page try; what it read, and what reached the engine."""
    counts.reached.clear()
    counts.statuses.clear()
    site.tries(targets)
    browser.opens(url, site.reported)
    said = [one for one in site.report if one["read"] and _REFUSAL not in one["read"]]
    read = [f"{one['name']}: {one['read']!r}" for one in said]
    reached = [f"{what} {number} times" for what, number in counts.reached.items()]
    print(
        f"{name}: {len(site.report)} attempts, {len(read)} read something, the engine was reached "
        f"{sum(counts.reached.values())} times; the server answered {dict(sorted(counts.statuses.items()))}"
    )
    return read, reached


def run(chromium: str) -> int:
    troubles: list[str] = []
    with contextlib.ExitStack() as things:
        counts = Counts()
        llm = things.enter_context(pipeline(TARGET, [6, 6]))
        things.enter_context(counting(counts))
        browser = Browser(chromium, things.enter_context(tempfile.TemporaryDirectory()))

        def serve(gate: Gate) -> Server:
            server = Server(Service(llm, "demo", gate), Listen(port=0))
            things.callback(server.close)
            return server

        site = Site()
        things.callback(site.close)
        page = f"http://{_ATTACKER}:{site.port}/"

        def refused(name: str, url: str, targets: list[str]) -> None:
            read, reached = attack(name, browser, site, url, targets, counts)
            troubles.extend(f"{name}: it read {one}" for one in read)
            troubles.extend(f"{name}: it reached {one}" for one in reached)
            if not site.report:
                troubles.append(f"{name}: it tried nothing")
            if good := [one for one in counts.statuses if one.split()[1][0] == "2"]:
                troubles.append(f"{name}: the server answered {good}")

        port = serve(Gate()).port
        hosts = (
            f"http://localhost:{port}",
            f"http://127.0.0.1:{port}",
            f"http://0.0.0.0:{port}",
            f"http://{_REBOUND}:{port}",
        )
        refused("open", page, list(hosts))

        keyed = serve(Gate(keys=ApiKeys([_USER])))
        name = keyed.service.sessions.begin(_USER)
        setter = Site(cookie(name, is_secure=False))
        things.callback(setter.close)
        browser.reads(f"http://localhost:{setter.port}/")
        shown = browser.reads(f"http://localhost:{keyed.port}/v1/models")
        if '"demo"' not in shown:
            troubles.append(f"control: the browser has no session: {shown[:300]}")
        refused("session", page, [f"http://localhost:{keyed.port}", f"http://127.0.0.1:{keyed.port}"])
        setter.page = site.page
        refused(
            "session, other port of this machine", f"http://localhost:{site.port}/", [f"http://localhost:{keyed.port}"]
        )

        rebinding = Rebinding(site, port)
        things.callback(rebinding.close)
        refused("rebound", f"http://{_REBOUND}:{rebinding.port}/", [f"http://{_REBOUND}:{rebinding.port}"])

        allowed = serve(Gate(origins=frozenset({f"http://{_ATTACKER}:{site.port}"})))
        read, reached = attack("control", browser, site, page, [f"http://localhost:{allowed.port}"], counts)
        if not read or not reached:
            troubles.append(f"control: a page that may use the server read {read} and reached {reached}")
    for trouble in troubles:
        print(trouble)
    print(f"{len(troubles)} troubles")
    return int(bool(troubles))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=next(filter(None, map(shutil.which, _NAMES)), None))
    options = parser.parse_args()
    if options.chromium is None:
        print("there is no chromium here, so no page was tried; Debian's package chromium has one")
        return 0
    return run(options.chromium)


if __name__ == "__main__":
    raise SystemExit(main())
