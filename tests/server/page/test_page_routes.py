"""The page's files and figures, by the real application without sockets."""

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from asgi import SECONDS, Client, answer, in_loop, told
from raw_http import Said
from valid_requests import Asked

import splitinfer
from splitinfer.llm import LLM
from splitinfer.server.gate import Gate
from splitinfer.server.guard import Guard
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.page.routes import CONTENT_SECURITY_POLICY
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

PAGE = Path(splitinfer.__file__).parent / "server" / "page"
FRONT = "site/index.html"
KEY = ("X-Api-Key", "secret")
FIGURES = "/v1/splitinfer/figures"


@pytest.fixture
def service(llm: LLM) -> Service:
    return Service(llm, "demo", Gate(keys=ApiKeys([ApiKey("laptop", digest("secret"))])))


def got(service: Service, path: str, *headers: tuple[str, str], method: str = "GET") -> Said:
    return told(make_app(service), path, None, *headers, method=method)


# -- files -----------------------------------------------------------------------------------------


def test_the_front_needs_no_key_and_lets_nothing_else_in(service: Service):
    said = got(service, "/", ("Accept", "text/html"))
    assert (said.status, said.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert said.body == (PAGE / FRONT).read_bytes()
    assert said.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert said.headers["x-content-type-options"] == "nosniff"
    for forbidden in ("unsafe", "http:", "https:", "*", "blob:"):
        assert forbidden not in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none';")


def test_a_file_comes_once(service: Service):
    path = "/page/vendor/marked.js"
    first = got(service, path)
    assert first.body == (PAGE / "vendor" / "marked.js").read_bytes()
    assert first.headers["content-type"].partition(";")[0] in ("text/javascript", "application/javascript")
    assert first.headers["cache-control"] == "no-cache"
    again = got(service, path, ("If-None-Match", first.headers["etag"]))
    assert (again.status, again.body) == (304, b"")
    assert again.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    other = got(service, path, ("If-None-Match", '"else"'))
    assert (other.status, other.body) == (200, first.body)


@pytest.mark.parametrize(
    "name", ["", "site", "../routes.py", "site/%2e%2e/routes.py", "site/../routes.py", "/etc/passwd"]
)
def test_nothing_else_is_a_file(service: Service, name: str):
    said = got(service, f"/page/{name}")
    assert (said.status, said.headers["cache-control"]) == (404, "no-store")


def test_every_file_has_what_it_imports():
    found = {
        str(path.relative_to(PAGE)): path for folder in ("site", "vendor") for path in (PAGE / folder).rglob("*.*")
    }
    assert len(found) > 10
    imports = re.compile(r"""(?:from|import)\s*\(?\s*["'](\.[^"']+)["']""")
    for name, file in found.items():
        if name.startswith("site/") and name.endswith(".js"):
            for target in imports.findall(file.read_text("utf-8")):
                path = (PAGE / name).parent / target
                assert str(path.resolve().relative_to(PAGE.resolve())) in found, (name, target)
    front = found[FRONT].read_text("utf-8")
    for target in re.findall(r'(?:src|href)="page/([^"]+)"', front):
        assert target in found
    assert "<script>" not in front
    assert "style=" not in front


def test_libraries_are_those_of_the_manifest():
    folder = PAGE / "vendor"
    manifest = json.loads((folder / "manifest.json").read_text())
    named = {"manifest.json"}
    for package in manifest["packages"]:
        named.add(f"{package['name']}.LICENSE")
        assert (folder / f"{package['name']}.LICENSE").stat().st_size > 500
        assert re.fullmatch(r"sha512-[A-Za-z0-9+/=]{88}", package["integrity"])
        assert package["licence"]
        for file in package["files"]:
            named.add(file["as"])
            assert hashlib.sha256((folder / file["as"]).read_bytes()).hexdigest() == file["sha256"], file["as"]
    assert {each.name for each in folder.iterdir()} == named


# -- figures ---------------------------------------------------------------------------------------


class Reader(Client):
    """A page that reads the figures as they come. Of an application of its own if none is given."""

    def __init__(self, service: Service, application: Guard | None = None) -> None:
        asked = Asked("GET", FIGURES, (KEY, ("Accept", "text/event-stream")))
        super().__init__(application or make_app(service), asked)

    async def next(self, name: str) -> Any:
        async with asyncio.timeout(SECONDS):
            while True:
                head, _, data = (await self.part()).decode().partition("\n")
                if head == f"event: {name}":
                    return json.loads(data.strip().removeprefix("data: "))


def test_figures_need_a_key(service: Service):
    assert got(service, FIGURES).status == 401
    said = json.loads(got(service, FIGURES, KEY).body)
    assert [stage["name"] for stage in said["pipeline"]["stages"]] == ["s0", "s1"]
    assert said["figures"]["words"][0]["code"] in ("rests", "begins", "fine")
    assert "body" not in got(service, FIGURES, KEY, method="HEAD").body.decode()


@in_loop
async def test_a_page_sees_the_steps_of_a_request_and_nothing_of_its_prompt(service: Service, llm: LLM):
    reader = Reader(service)
    assert (await reader.next("pipeline"))["context"] == llm.context_length
    await reader.next("figures")
    secret = "The secret word is xylophone."
    async for _ in llm.astream(secret, splitinfer.SamplingParams(max_tokens=12, ignore_eos=True)):
        pass
    kinds, seen = set[str](), set[str]()
    while not kinds or len(seen) < 2:
        figures = await reader.next("figures")
        assert len(figures["tracks"]) == len(figures["stages"]) == 2
        kinds |= {span[2] for span in figures["tracks"][1]}
        moved = {"tokens": figures["generated_per_second"], "bytes": figures["links"][0]["bytes_per_second"]}
        seen |= {name for name, rate in moved.items() if rate > 0}
        assert "xylophone" not in json.dumps(figures)
        assert len(json.dumps(figures)) < 8000
    assert kinds <= {"p", "d", "m", "f"}
    await reader.leave()
    assert llm._engine.figures.watch is None, "when nobody looks, no step is kept"


@in_loop
async def test_who_looks_is_counted(service: Service):
    application = make_app(service)

    async def looking() -> int:
        return int((await answer(application, Asked("GET", FIGURES, (KEY,)))).json["looking"])

    readers = [Reader(service, application) for _ in range(2)]
    for reader in readers:
        await reader.next("figures")
    assert await looking() == 2, "without the one who asks"
    for reader in readers:
        await reader.leave()
    assert await looking() == 0


@in_loop
async def test_figures_end_with_the_server(service: Service):
    reader = Reader(service)
    await reader.next("figures")
    service.is_draining = True
    await reader.task
