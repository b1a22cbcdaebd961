"""To whom a server may be opened, and under which names it is addressed."""

from pathlib import Path

import pytest

from splitinfer.cli.serving import Access
from splitinfer.errors import ConfigError
from splitinfer.server.exposure import check_exposure, names_of
from splitinfer.server.keys import new_secret

HERE, NETWORK, ALL = "127.0.0.1", "192.168.0.2", "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "has_keys", "no_auth", "origins", "refused"),
    [
        (HERE, False, False, [], None),
        ("::1", False, False, [], None),
        ("localhost", True, False, [], None),
        (NETWORK, False, False, [], "whoever reaches 192.168.0.2 could use this server"),
        (ALL, False, False, [], "whoever reaches 0.0.0.0"),
        ("::", False, False, [], "whoever reaches ::"),
        ("mini.local", False, False, [], "whoever reaches mini.local"),
        (ALL, True, False, ["*"], None),
        (ALL, False, True, [], None),
        (HERE, True, True, [], "leave one of them out"),
        (HERE, False, False, ["https://chat.example"], None),
        (HERE, False, False, ["*"], "lets every page of the web use a server without keys"),
        (HERE, False, True, ["*"], None),
    ],
)
def test_no_more_than_was_said(host: str, has_keys: bool, no_auth: bool, origins: list[str], refused: str | None):
    if refused is None:
        check_exposure(host, has_keys=has_keys, no_auth=no_auth, origins=origins)
        return
    with pytest.raises(ConfigError, match=refused):
        check_exposure(host, has_keys=has_keys, no_auth=no_auth, origins=origins)


def test_names():
    own = ["Mini", "mini.local", "192.168.0.2"]
    assert names_of(ALL, own, ["AI.example:443"]) == {"mini", "mini.local", "192.168.0.2", "ai.example"}
    assert names_of(HERE, own, []) == {HERE}


def test_a_key_that_can_be_guessed_is_said(caplog: pytest.LogCaptureFixture):
    assert Access(HERE, api_keys=("1234",)).gate()
    assert Access(NETWORK, api_keys=(new_secret(),)).gate()
    assert not caplog.text
    assert Access(NETWORK, api_keys=(new_secret(), "1234")).gate()
    assert "a key of 4 characters can be found by trying" in caplog.text


def test_what_the_command_line_gives_makes_the_rules(tmp_path: Path):
    gate = Access(NETWORK, api_keys=("one", "two"), origins=("https://chat.example/",)).gate()
    assert gate.keys is not None
    assert gate.keys.find("two") is not None
    assert gate.hosts == {NETWORK}
    assert gate.allows("https://chat.example")
    assert Access().gate().keys is None
    for access, reason in (
        (Access(ALL), "whoever reaches"),
        (Access(api_keys=(" ",)), "an API key is empty"),
        (Access(key_file=tmp_path / "none"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            access.gate()
