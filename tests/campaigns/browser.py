"""The page in Chromium against real servers of two stages: driven as a person would, and attacked by another page.

    python -m tests.campaigns browser                        # needs playwright (pip) and chromium (Debian's)
    python -m tests.campaigns browser --only chat hostile --pictures FOLDER

Scenes (``scenes.py``, ``live_scenes.py``) drive it, in an order that the seed draws. What must never be seen in any: a
message of the Content-Security-Policy, an error in the console, a request to another server.

``hostile``: a page (``hostile.html``) of another origin tries what pages can: fetch in all modes, forms, images,
scripts, frames, beacons, EventSource, WebSocket, workers; at each of the server's names. It must read nothing, and
no request of it may be served. Four servers:

    open        without keys
    session     with keys, and the browser holds a session that a key has bought
    rebound     the page's own name becomes the server's (DNS rebinding): its host first sends the page, and from then
                on passes every connection on to the server, which so is of the page's own origin
    control     with `--cors` for the page: here it must get through, or the page tries nothing

Another control: with the session, the browser itself (its address bar) reads `/v1/models`.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import re
import shutil
import socket
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cable import Cable
from stages import pipeline

from splitinfer.demo import TARGET
from splitinfer.llm import LLM
from splitinfer.server.gate import Gate, cookie
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

from .report import Missing, Report

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PAGE = Path(__file__).parent / "hostile.html"
_ATTACKER, _REBOUND = "attacker.example", "rebound.example"
_SECONDS = 180.0
_REFUSAL = "is not allowed; to allow it"  # what a page of a rebound name reads, as it is of the same origin
_USER = ApiKey("laptop", digest("bought with this"))


class Statuses(logging.Handler):
    """Counts the lines of the access log: what was asked for, and the status."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self._log = logging.getLogger("splitinfer.server.guard")
        self._log.addHandler(self)
        self._log.setLevel(logging.INFO)
        self._log.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if (found := re.search(r"request \S+ \S+ (\S+) \S+ (\d+)", record.getMessage())) is not None:
            self.counts[f"{found[1]} {found[2]}"] += 1

    @property
    def good(self) -> list[str]:
        return [one for one in self.counts if one.split()[1][0] == "2"]

    def close(self) -> None:
        self._log.removeHandler(self)
        super().close()


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
        page = _PAGE.read_text().replace("TARGETS", json.dumps(targets).replace('"', '\\"'))
        self.page = page.replace("REPORT", f"http://{_ATTACKER}:{self.port}/report").encode()
        self.reported.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Rebinding(Cable):
    """A host whose name points elsewhere after the page has come: connections are passed on from then on."""

    def __init__(self, site: Site, server_port: int) -> None:
        self._site = site
        super().__init__(server_port)

    def leads_to(self, near: socket.socket) -> int:
        return self._site.port if near.recv(6, socket.MSG_PEEK) == b"GET / " else super().leads_to(near)


class Attacks:
    """What a hostile page tries on servers of one pipeline, in a context of the browser."""

    def __init__(self, report: Report, llm: LLM, context: Any, things: contextlib.ExitStack) -> None:
        self._report, self._llm, self._things = report, llm, things
        self._page, self._statuses = context.new_page(), self._closed(Statuses())
        self.site = self._closed(Site())
        self.origin = f"http://{_ATTACKER}:{self.site.port}"

    def _closed(self, made: Any) -> Any:
        self._things.callback(made.close)
        return made

    def serve(self, gate: Gate) -> Server:
        server: Server = self._closed(Server(Service(self._llm, "demo", gate), Listen(port=0)))
        return server

    def let(self, name: str, url: str, targets: list[str]) -> list[str]:
        """Let the page try; what it read."""
        self._statuses.counts.clear()
        self.site.tries(targets)
        self._page.goto(url)
        if not self.site.reported.wait(_SECONDS):
            raise TimeoutError(f"the page at {url} did not report within {_SECONDS:g} s")
        said = [one for one in self.site.report if one["read"] and _REFUSAL not in one["read"]]
        self._report.say(
            f"{name}: {len(self.site.report)} attempts, {len(said)} read something; "
            f"the server answered {dict(sorted(self._statuses.counts.items()))}"
        )
        return [f"{one['name']}: {one['read']!r}" for one in said]

    def refused(self, name: str, url: str, targets: list[str]) -> int:
        """Nothing may come of it; how often it tried."""
        read = self.let(name, url, targets)
        self._report.expect_none((f"it read {one}" for one in read), name)
        self._report.check(self.site.report, f"{name}: it tried nothing")
        self._report.check(not self._statuses.good, f"{name}: the server answered {self._statuses.good}")
        return len(self.site.report)

    def all(self) -> int:
        """Every server; how often the page tried."""
        port = self.serve(Gate()).port
        names = ("localhost", "127.0.0.1", "0.0.0.0", _REBOUND)
        tried = self.refused("open", f"{self.origin}/", [f"http://{name}:{port}" for name in names])
        keyed = self.serve(Gate(keys=ApiKeys([_USER])))
        bought = cookie(keyed.service.sessions.begin(_USER), is_secure=False)
        here = f"http://localhost:{keyed.port}"
        self._page.goto(f"http://localhost:{self._closed(Site(bought)).port}/")
        self._page.goto(f"{here}/v1/models")
        shown = self._page.inner_text("body")
        self._report.check('"demo"' in shown, f"control: the browser has no session: {shown[:300]}")
        tried += self.refused("session", f"{self.origin}/", [here, f"http://127.0.0.1:{keyed.port}"])
        tried += self.refused("session, other port of this machine", f"http://localhost:{self.site.port}/", [here])
        rebinding = self._closed(Rebinding(self.site, port))
        origin = f"http://{_REBOUND}:{rebinding.port}"
        tried += self.refused("rebound", f"{origin}/", [origin])
        allowed = self.serve(Gate(origins=frozenset({self.origin})))
        read = self.let("control", f"{self.origin}/", [f"http://localhost:{allowed.port}"])
        self._report.check(read and self._statuses.good, f"control: a page that may use the server read {read}")
        return tried + len(self.site.report)


def hostile(report: Report, browser: Any) -> None:
    with contextlib.ExitStack() as things:
        llm = things.enter_context(pipeline(TARGET, [6, 6]))
        context = browser.new_context()
        things.callback(context.close)
        report.figures["attempts"] = Attacks(report, llm, context, things).all()


# -- the campaign ----------------------------------------------------------------------------------


def play(report: Report, driven: Any, scene: Callable[[Any], None]) -> None:
    driven.complaints.clear()
    driven.page.set_viewport_size({"width": 1280, "height": 800})
    driven.page.goto(driven.url)
    driven.page.reload()
    try:
        driven.ready()
        scene(driven)
    except Exception:  # noqa: BLE001 - the next scene is played in any case
        driven.picture(f"failed-{scene.__name__}")
        report.wrong(f"{scene.__name__}: {traceback.format_exc(limit=-2)}")
    report.expect_none(driven.complaints, scene.__name__)
    report.say(f"{scene.__name__} is played")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chromium", default=next(filter(None, map(shutil.which, _NAMES)), None))
    parser.add_argument("--pictures", type=Path, default=Path(tempfile.gettempdir()) / "splitinfer-page")
    parser.add_argument("--only", nargs="*", help="names of scenes, and hostile")


def campaign(report: Report, given: argparse.Namespace) -> None:
    if given.chromium is None:
        raise Missing("there is no chromium here; Debian's package chromium has one")
    if importlib.util.find_spec("playwright") is None:
        raise Missing("playwright (pip) is not installed here")
    from playwright.sync_api import sync_playwright

    from . import live_scenes, scenes
    from .driving import Driven, demo, watched

    todo = [one for one in (*scenes.SCENES, *live_scenes.SCENES) if not given.only or one.__name__ in given.only]
    names = list[str]()
    given.pictures.mkdir(parents=True, exist_ok=True)
    rules = f"--host-resolver-rules=MAP {_ATTACKER} 127.0.0.1, MAP {_REBOUND} 127.0.0.1"
    with demo() as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox", rules])
        report.begin()
        if not given.only or "hostile" in given.only:
            hostile(report, browser)
        page = browser.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page()
        driven = Driven(page, server, given.pictures)
        watched(driven)
        for scene in report.chance().sample(todo, len(todo)):
            if names and report.is_over:
                break
            play(report, driven, scene)
            names.append(scene.__name__)
        browser.close()
    report.figures |= {"scenes": names, "scenes_left_out": len(todo) - len(names), "pictures": str(given.pictures)}
