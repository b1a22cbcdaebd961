"""Keys and sessions: the file, what a running server makes of its changes, and what a key buys."""

import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pydantic
import pytest
from mutating import TALE
from processes import until
from typer.testing import CliRunner

from splitinfer.errors import ConfigError
from splitinfer.llm import LLM
from splitinfer.server.gate import MAX_OF_KEY, SESSION_COOKIE, SESSION_SECONDS, Facts, Gate, Sessions, cookie
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, add_key, digest, read_keys, remove_key
from splitinfer.server.problem import Problem
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

GIVEN, USER = ApiKey("given-1", digest("given")), ApiKey("laptop", digest("secret"))
LONG = {"messages": TALE, "max_tokens": 2000, "ignore_eos": True, "stream": True}
CHAT, AT_MOST = "/v1/chat/completions", 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "keys.yaml"


@pytest.fixture
def laptop(path: Path) -> str:
    return add_key(path, "laptop", concurrent=3)


# -- the file --------------------------------------------------------------------------------------


def test_keys_are_added_and_removed(path: Path):
    laptop, phone = add_key(path, "laptop"), add_key(path, "phone", [Scope.ADMIN], 30.0, 2)
    expected = ApiKey("phone", digest(phone), frozenset({Scope.ADMIN}), 30.0, 2)
    assert read_keys(path) == [ApiKey("laptop", digest(laptop)), expected]
    assert laptop not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    remove_key(path, "laptop")
    assert read_keys(path) == [expected]
    assert [each.name for each in path.parent.iterdir()] == ["keys.yaml"], "no half-written file is left"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: add_key(path, "laptop"), "has a key 'laptop' already"),
        (lambda path: add_key(path, " "), "key ' ': name: "),
        (lambda path: add_key(path, "x", concurrent=0), "key 'x': concurrent: input should be greater than 0"),
        (lambda path: add_key(path, "x", [Scope.USE], float("nan")), "key 'x': requests_per_minute: "),
        (lambda path: remove_key(path, "phone"), "has no key 'phone'"),
        (lambda path: add_key(path / "below", "x"), "cannot be written"),
    ],
)
def test_a_change_that_cannot_be_leaves_the_file(path: Path, laptop: str, change, reason: str):
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=reason):
        change(path)
    assert path.read_bytes() == before


DAMAGED = [
    ("", "input should be a valid list"),
    ("stages: []", "input should be a valid list"),
    ("[1]", "key 1 of "),
    ("- {name: a}", "key 1 of .*: sha256: "),
    ("- {name: a, sha256: b}", "key 1 of .*: sha256: string should match"),
    ("- {name: a, sha256: %s, scopes: [rule]}", "key 1 of .*: scopes: input should be 'use', 'admin' or 'metrics'"),
    ("- {name: a, sha256: %s, scopes: []}", "scopes: "),
    ("- {name: a, sha256: %s, concurrent: 0}", "concurrent: "),
    ("- {name: a, sha256: %s, concurrent: 1.5}", "concurrent: "),
    ("- {name: a, sha256: %s, concurrent: true}", "concurrent: "),
    ("- {name: a, sha256: %s, requests_per_minute: many}", "requests_per_minute: "),
    ("- {name: a, sha256: %s, requests_per_minute: .inf}", "requests_per_minute: "),
    ("- {name: a, sha256: %s, extra: 1}", "extra: "),
    ("- {name: '', sha256: %s}", "name: "),
    ("- {name: a, sha256: %s}\n- {name: a, sha256: 0%s}", "sha256: "),
    *((text, "cannot be read") for text in ("[" * 1500, "- [", "- 2026-13-01", '- !!int ""', "- !!bool x", "- \x00")),
]


@pytest.mark.parametrize(("text", "reason"), DAMAGED)
def test_a_damaged_file_admits_nobody_and_is_not_overwritten(path: Path, laptop: str, text: str, reason: str):
    keys, text = ApiKeys([GIVEN], path), text.replace("%s", "a" * 64)
    path.write_text(text)
    for _ in range(2):
        assert (keys.find(laptop), keys.find("given")) == (None, GIVEN)
    for use in (lambda: ApiKeys([], path), lambda: add_key(path, "phone")):
        with pytest.raises(ConfigError, match=reason):
            use()
    assert path.read_text() == text


def test_a_running_server_follows_the_file(path: Path, laptop: str, caplog: pytest.LogCaptureFixture):
    keys = ApiKeys([GIVEN], path)
    known = keys.find(laptop)
    assert known is not None
    phone = add_key(path, "phone")
    assert [key.name for key in keys] == ["laptop", "phone", "given-1"]
    remove_key(path, "laptop")
    assert (keys.holds(known), keys.find(laptop)) == (False, None)
    assert keys.find(phone) is not None
    path.unlink()
    assert (keys.find(phone), keys.find("given")) == (None, GIVEN)
    assert "no key of the file is admitted" in caplog.text
    again = add_key(path, "again")
    assert keys.find(again) is not None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_admits_nobody(
    path: Path, laptop: str, mode: int, caplog: pytest.LogCaptureFixture
):
    keys = ApiKeys([], path)
    path.chmod(mode)
    assert keys.find(laptop) is None
    assert "other users can write" in caplog.text
    with pytest.raises(ConfigError, match="chmod 600"):
        ApiKeys([], path)
    path.chmod(0o644)
    assert keys.find(laptop) is not None


def test_names_and_digests_are_unique():
    for other in (ApiKey("laptop", digest("other")), ApiKey("phone", USER.sha256)):
        with pytest.raises(ConfigError, match=r"two API keys .*, or one key under two names"):
            ApiKeys([USER, other])
    with pytest.raises(pydantic.ValidationError):
        ApiKey("a" * 61, USER.sha256)


def test_the_command_shows_a_key_once(path: Path, monkeypatch: pytest.MonkeyPatch):
    from splitinfer.cli import app, keys

    monkeypatch.setattr(keys, "set_up", lambda verbose: None)
    monkeypatch.setattr(keys, "finish", lambda run, verbose: run())

    def run(*args: str) -> str:
        done = CliRunner().invoke(app, ["keys", *args, "--file", str(path)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    secret = run("add", "laptop", "--scope", "admin", "--concurrent", "3").strip()
    assert read_keys(path)[0].sha256 == digest(secret)
    assert run("ls") == "laptop: admin; any rate, 3 at a time\n"
    run("rm", "laptop")
    assert run("ls").endswith("has no key\n")
    with pytest.raises(ConfigError, match="there is no scope 'root'"):
        run("add", "x", "--scope", "root")


# -- while requests are under way ------------------------------------------------------------------


@pytest.fixture
def server(llm: LLM, path: Path, laptop: str) -> Iterator[Server]:
    server = Server(Service(llm, "demo", Gate(keys=ApiKeys([], path))), Listen(port=0))
    yield server
    server.close()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=AT_MOST) as client:
        yield client


def shows(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_that_is_changed_under_a_stream(client: httpx.Client, server: Server, path: Path, laptop: str):
    """What was admitted goes on to its end; nothing more is; the new key is at once, under the same limits."""
    with client.stream("POST", CHAT, json={**LONG, "max_tokens": 300}, headers=shows(laptop)) as response:
        lines = response.iter_lines()
        next(lines)
        remove_key(path, "laptop")
        assert client.get("/v1/models", headers=shows(laptop)).status_code == 401
        assert client.get("/health").json()["running"] == 1
        again = add_key(path, "laptop", concurrent=1)
        assert client.get("/v1/models", headers=shows(again)).status_code == 200
        assert client.post(CHAT, json=LONG, headers=shows(again)).status_code == 429, "the old one's stream counts"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    until(lambda: server.service.num_running == 0, "it is over")
    assert client.post(CHAT, json={"messages": TALE, "max_tokens": 1}, headers=shows(again)).status_code == 200


def test_no_more_at_once_than_a_key_may_however_many_ask(client: httpx.Client, server: Server, laptop: str):
    statuses, all_asked, enough = list[int](), threading.Barrier(12), threading.Event()

    def ask() -> None:
        all_asked.wait(AT_MOST)
        with client.stream("POST", CHAT, json=LONG, headers=shows(laptop)) as response:
            statuses.append(response.status_code)
            enough.wait(AT_MOST)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    until(lambda: len(statuses) == 12, "all have their answer")
    assert sorted(statuses) == [200] * 3 + [429] * 9
    assert client.post(CHAT, json={**LONG, "n": 4}, headers=shows(laptop)).status_code == 400
    enough.set()
    for thread in threads:
        thread.join(AT_MOST)
    until(lambda: server.service.num_running == 0, "all are over")


# -- sessions --------------------------------------------------------------------------------------


def test_a_session_ends_by_time_or_when_told():
    now = 100.0
    sessions = Sessions(lambda: now)
    first, second = sessions.begin(USER), sessions.begin(USER)
    assert first != second
    assert (sessions.end(second), sessions.end(second), sessions.key_of(second)) == (True, False, None)
    now += SESSION_SECONDS - 1
    assert sessions.key_of(first) is USER
    now += 1
    assert sessions.key_of(first) is None
    assert not sessions._held, "what has expired is gone"


def test_the_oldest_makes_room_of_the_same_key_first():
    sessions, other = Sessions(most=100), ApiKey("phone", digest("other"))
    theirs, names = sessions.begin(other), [sessions.begin(USER) for _ in range(300)]
    assert sessions.key_of(theirs) is other
    assert [name for name in names if sessions.key_of(name) is not None] == names[-MAX_OF_KEY:]
    few = Sessions(most=2)
    names = [few.begin(USER) for _ in range(3)]
    assert [few.key_of(name) for name in names] == [None, USER, USER]


def test_a_session_is_out_of_reach_of_scripts_of_other_sites_and_of_those_who_chose_its_name(
    client: httpx.Client, laptop: str
):
    parts = set(cookie("n", is_secure=False).split("; "))
    assert parts == {"splitinfer_session=n", "HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={SESSION_SECONDS}"}
    assert set(cookie("n", is_secure=True).split("; ")) - parts == {"Secure"}
    assert "Max-Age=0" in cookie("", is_secure=False, seconds=0)
    sessions = Sessions()
    name = sessions.begin(USER)
    assert name not in str(sessions._held)
    assert sessions.key_of(digest(name)) is None
    chosen = {"Cookie": f"{SESSION_COOKIE}=chosen"}
    bought = client.post("/session", json={}, headers={**shows(laptop), **chosen})
    assert "chosen" not in bought.headers["set-cookie"]
    client.cookies.clear()
    assert client.get("/v1/models", headers=chosen).status_code == 401


def test_a_session_ends_with_its_key():
    sessions = Sessions()
    facts = Facts("GET", "/v1/models", {"host": "localhost"}, {SESSION_COOKIE: sessions.begin(USER)})
    assert Gate(keys=ApiKeys([USER])).caller(facts, sessions) is USER
    for keys in ([], [replace(USER, sha256=digest("another"))], [replace(USER, concurrent=1)]):
        with pytest.raises(Problem, match="an API key is needed"):
            Gate(keys=ApiKeys(keys)).caller(facts, sessions)
