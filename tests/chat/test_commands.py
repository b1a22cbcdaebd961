"""What a typed text means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.chat.commands import COMMANDS, Command, InvalidInput, Say, help_text, parse


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", None),
        (" \n\t ", None),
        ("hello", Say("hello")),
        (" indented\n", Say(" indented\n")),
        (" /quit", Say(" /quit")),
        ("/usr/bin is a folder", Say("/usr/bin is a folder")),
        ("// a comment\nint x;", Say("// a comment\nint x;")),
        ("/quit", Command("quit", "")),
        ("/QUIT  ", Command("quit", "")),
        ("/temp 0.5", Command("temp", "0.5")),
        ("/temp", Command("temp", "")),
        ("/system Be\nbrief.", Command("system", "Be\nbrief.")),
        ("/save my talk.json ", Command("save", "my talk.json")),
        ("/rest", InvalidInput("there is no command /rest; did you mean /reset?")),
        ("/exit", Command("quit", "")),
        ('"""two\nlines"""\n', Say("two\nlines")),
        ("/xyzzy", InvalidInput("there is no command /xyzzy; /help lists the commands")),
        ("/", InvalidInput("there is no command /; /help lists the commands")),
        ("/save", InvalidInput("/save needs a file name: /save FILE")),
        ("/quit now", InvalidInput("/quit takes no argument")),
    ],
)
def test_parse(text: str, meant: object):
    assert parse(text) == meant


@given(st.text())
def test_anything_means_something(text: str):
    meant = parse(text)
    assert (meant is None) == (not text.strip())
    assert not isinstance(meant, Say) or meant.text in text
    assert not isinstance(meant, Command) or meant.name in COMMANDS


@pytest.mark.parametrize("columns", [40, 200])
def test_help_names_every_command_on_lines_that_fit(columns: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    commands, _, _keys = help_text().partition("\n\n")
    assert all(f"/{name} " in commands for name in COMMANDS)
    assert max(map(len, commands.splitlines())) <= min(columns, 80)
