"""What a typed text means."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.chat.commands import COMMANDS, Command, help_text, parse


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", None),
        (" \n\t ", None),
        ("hello", "hello"),
        (" indented\n", " indented\n"),
        (" /quit", " /quit"),
        ("/usr/bin is a folder", "/usr/bin is a folder"),
        ("// a comment\nint x;", "// a comment\nint x;"),
        ("/quit", Command("quit", "")),
        ("/QUIT  ", Command("quit", "")),
        ("/temp 0.5", Command("temp", "0.5")),
        ("/temp", Command("temp", "")),
        ("/system Be\nbrief.", Command("system", "Be\nbrief.")),
        ("/save my talk.json ", Command("save", "my talk.json")),
        ("/exit", Command("quit", "")),
        ('"""two\nlines"""\n', "two\nlines"),
    ],
)
def test_parse(text: str, meant: object):
    assert parse(text) == meant


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("/rest", "there is no command /rest; did you mean /reset?"),
        ("/xyzzy", "there is no command /xyzzy; /help lists the commands"),
        ("/", "there is no command /; /help lists the commands"),
        ("/save", "/save needs a file name: /save FILE"),
        ("/quit now", "/quit takes no argument"),
    ],
)
def test_what_is_no_command_is_said(text: str, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parse(text)


@given(st.text())
def test_anything_means_something(text: str):
    try:
        meant = parse(text)
    except ValueError:
        return
    assert (meant is None) == (not text.strip())
    assert not isinstance(meant, str) or meant in text
    assert not isinstance(meant, Command) or meant.name in COMMANDS


@pytest.mark.parametrize("columns", [40, 200])
def test_help_names_every_command_on_lines_that_fit(columns: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    commands, _, _keys = help_text().partition("\n\n")
    assert all(f"/{name} " in commands for name in COMMANDS)
    assert max(map(len, commands.splitlines())) <= min(columns, 80)
