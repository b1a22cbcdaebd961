"""Keys and sessions: the file, what a running server makes of its changes, and what a key buys."""

import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pydantic
import pytest
from asgi import Client, answer, in_loop, posted, told
from typer.testing import CliRunner
from valid_requests import TALE, Asked

from splitinfer.errors import ConfigError
from splitinfer.llm import LLM
from splitinfer.server import keys as keys_module
from splitinfer.server.gate import MAX_OF_KEY, SESSION_COOKIE, SESSION_SECONDS, Facts, Gate, Sessions, cookie
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, add_key, digest, read_keys, remove_key
from splitinfer.server.problem import Problem
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

GIVEN, USER = ApiKey("given-1", digest("given")), ApiKey("laptop", digest("secret"))
LONG = {"messages": TALE, "max_tokens": 3000, "ignore_eos": True, "stream": True}
CHAT, MODELS = "/v1/chat/completions", "/v1/models"


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


def test_changes_at_the_same_time_are_all_kept(path: Path, laptop: str, monkeypatch: pytest.MonkeyPatch):
    """A key that was removed does not come back by a change that had read the file before."""

    def slowly(*arguments: object) -> list[ApiKey]:
        found = read_keys(path)
        time.sleep(0.02)
        return found

    monkeypatch.setattr(keys_module, "read_keys", slowly)
    changes = [threading.Thread(target=add_key, args=(path, f"key {i}")) for i in range(5)]
    changes.append(threading.Thread(target=remove_key, args=(path, "laptop")))
    for each in changes:
        each.start()
    for each in changes:
        each.join()
    assert sorted(each.name for each in read_keys(path)) == [f"key {i}" for i in range(5)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: add_key(path, "laptop"), "has a key 'laptop' already"),
        (lambda path: add_key(path, " "), "key ' ': name: "),
        (lambda path: add_key(path, "x", concurrent=0), "key 'x': concurrent: "),
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "input should be a valid list"),
        ("[1]", "key 1 of "),
        ("- {name: a}", "key 1 of .*: sha256: "),
        ("- {name: a, sha256: b}", "key 1 of .*: sha256: "),
        ("- {name: a, sha256: %s, scopes: [rule]}", "key 1 of .*: scopes: .*'use', 'admin' or 'metrics'"),
        ("- {name: a, sha256: %s, concurrent: true}", "concurrent: "),
        ("- {name: a, sha256: %s, requests_per_minute: .inf}", "requests_per_minute: "),
        ("- {name: a, sha256: %s, extra: 1}", "extra: "),
        ("- {name: a, sha256: %s}\n- {name: a, sha256: 0%s}", "sha256: "),
        *((text, "cannot be read") for text in ("[" * 400, "- [", '- !!int ""', "- \x00")),
    ],
)
def test_a_damaged_file_admits_nobody_and_is_not_overwritten(path: Path, laptop: str, text: str, reason: str):
    keys, text = ApiKeys([GIVEN], path), text.replace("%s", "a" * 64)
    path.write_text(text)
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
    assert keys.find(add_key(path, "again")) is not None


def test_a_file_that_others_can_write_admits_nobody(path: Path, laptop: str, caplog: pytest.LogCaptureFixture):
    keys = ApiKeys([], path)
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert keys.find(laptop) is None
        with pytest.raises(ConfigError, match="chmod 600"):
            ApiKeys([], path)
    assert "other users can write" in caplog.text
    path.chmod(0o644)
    assert keys.find(laptop) is not None


def test_names_and_digests_are_unique():
    for other in (ApiKey("laptop", digest("other")), ApiKey("phone", USER.sha256)):
        with pytest.raises(ConfigError, match=r"two API keys .*, or one key under two names"):
            ApiKeys([USER, other])
    with pytest.raises(pydantic.ValidationError):
        ApiKey("a" * 61, USER.sha256)


def test_the_command_shows_a_key_once(path: Path):
    from splitinfer.cli import app

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


def shows(key: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {key}")


@in_loop
async def test_a_key_that_is_changed_under_a_stream(llm: LLM, path: Path, laptop: str):
    """What was admitted goes on; nothing more is; the new key is at once, under the same limits."""
    service = Service(llm, "demo", Gate(keys=ApiKeys([], path)))
    application = make_app(service)

    async def status(key: str, body: object = None) -> int:
        asked = Asked("GET", MODELS, (shows(key),)) if body is None else posted(CHAT, body, shows(key))
        return (await answer(application, asked)).status

    client = Client(application, posted(CHAT, LONG, shows(laptop)))
    await client.part()
    remove_key(path, "laptop")
    assert await status(laptop) == 401
    again = add_key(path, "laptop", concurrent=1)
    assert await status(again) == 200
    assert await status(again, LONG) == 429, "the old one's stream counts"
    assert await status(again, {**LONG, "n": 2}) == 400, "it never may"
    await client.part()
    await client.leave()
    assert service.num_running == 0
    assert await status(again, {"messages": TALE, "max_tokens": 1}) == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/apply-template", {"messages": TALE}),
        ("/v1/messages/count_tokens", {"messages": TALE}),
        ("/v1/responses/input_tokens", {"input": "a"}),
    ],
)
def test_counting_and_tokenizing_count_as_requests(llm: LLM, route: str, body: object):
    service = Service(llm, "demo", Gate(keys=ApiKeys([replace(USER, requests_per_minute=1)])))
    application = make_app(service)
    assert [told(application, route, body, shows("secret")).status for _ in range(2)] == [200, 429]
    assert service.num_running == 0


# -- sessions --------------------------------------------------------------------------------------


def test_a_key_buys_a_session(llm: LLM):
    application = make_app(Service(llm, "demo", Gate(keys=ApiKeys([USER]))))
    assert told(application, "/session", {}).status == 401
    bought = told(application, "/session", {}, shows("secret"), ("Cookie", f"{SESSION_COOKIE}=chosen"))
    assert bought.json == {"session": True, "name": "laptop", "scopes": ["use"]}
    made = bought.headers["set-cookie"]
    assert "HttpOnly" in made
    assert not [word for word in ("secret", "chosen", "Secure") if word in made], "for TLS, and of the server's making"
    session = ("Cookie", made.partition(";")[0])
    assert told(application, MODELS, None, session).status == 200
    assert told(application, "/session", {}, session).status == 401, "a session does not prolong itself"
    assert told(application, MODELS, None, session, ("Origin", "http://localhost:1")).status == 403
    assert told(application, MODELS, None, ("Cookie", f"{SESSION_COOKIE}=chosen")).status == 401
    ended = told(application, "/session", None, session, method="DELETE")
    assert ended.json == {"ended": True}
    assert told(application, MODELS, None, session).status == 401


def test_a_session_ends_by_time_or_when_told():
    now = 100.0
    sessions = Sessions(lambda: now)
    first, second = sessions.begin(USER), sessions.begin(USER)
    assert first != second
    assert sessions.key_of(digest(first)) is None, "what is held is not its name"
    assert (sessions.end(second), sessions.end(second), sessions.key_of(second)) == (True, False, None)
    now += SESSION_SECONDS - 1
    assert sessions.key_of(first) is USER
    now += 1
    assert sessions.key_of(first) is None


def test_the_oldest_makes_room_of_the_same_key_first():
    sessions, other = Sessions(most=100), ApiKey("phone", digest("other"))
    theirs, names = sessions.begin(other), [sessions.begin(USER) for _ in range(300)]
    assert sessions.key_of(theirs) is other
    assert [name for name in names if sessions.key_of(name) is not None] == names[-MAX_OF_KEY:]
    few = Sessions(most=2)
    names = [few.begin(USER) for _ in range(3)]
    assert [few.key_of(name) for name in names] == [None, USER, USER]


def test_a_session_is_out_of_reach_of_scripts_and_of_other_sites():
    parts = set(cookie("n", is_secure=False).split("; "))
    assert parts == {"splitinfer_session=n", "HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={SESSION_SECONDS}"}
    assert set(cookie("n", is_secure=True).split("; ")) - parts == {"Secure"}
    assert "Max-Age=0" in cookie("", is_secure=False, seconds=0)


def test_a_session_ends_with_its_key():
    sessions = Sessions()
    facts = Facts("GET", MODELS, {"host": "localhost"}, {SESSION_COOKIE: sessions.begin(USER)})
    assert Gate(keys=ApiKeys([USER])).caller(facts, sessions) is USER
    for keys in ([], [replace(USER, sha256=digest("another"))], [replace(USER, concurrent=1)]):
        with pytest.raises(Problem, match="an API key is needed"):
            Gate(keys=ApiKeys(keys)).caller(facts, sessions)
