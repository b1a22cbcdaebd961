"""What each route answers whom is what the page says, and a page of another site gets nothing anywhere."""

from collections.abc import Iterator

import access_table
import pytest
from stages import pipeline

from splitinfer.demo import TARGET


@pytest.fixture(scope="module")
def text() -> Iterator[str]:
    with pipeline(TARGET, [6, 6]) as llm:
        yield access_table.tables(llm)


def test_the_page_says_what_is_answered(text: str):
    assert access_table.on_page() == text, "python -m tests.server.access_table --write"


def read(text: str) -> list[dict[str, str]]:
    """The tables as rows, a server with keys first."""
    found = []
    for table in text.split("## ")[1:]:
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
        found += [dict(zip(lines[0], row, strict=True)) for row in lines[2:]]
    return found


def test_a_page_of_another_site_gets_nothing(text: str):
    rows = read(text)
    assert len(rows) > 30
    for row in rows:
        for who in ("page of another site", "origin null", "rebound name", "tricks with names", "preflight"):
            assert row[who] == "403", (row["route"], who)
        assert row.get("session, from another site", "403") == "403", row["route"]


OPEN = ("/health`", "/`", "/page/NAME`")  # the page's files hold nothing secret


def test_every_route_but_health_and_the_pages_files_needs_a_key(text: str):
    for row in read(text):
        if "no key" in row:
            needs_none = row["route"] == "`DELETE /session`" or row["route"].split()[-1] in OPEN
            assert (row["no key"], row["wrong key"]) == (("200", "200") if needs_none else ("401", "401")), row["route"]


def test_only_a_key_for_dials_turns_them(text: str):
    row = next(row for row in read(text) if row["route"] == "`PATCH /v1/splitinfer/dials`")
    may = {"key for dials", "preflight of `--cors`"}
    given = {who: status for who, status in row.items() if who != "route" and status in ("200", "204")}
    assert given.keys() == may, "nor a session that another key has bought"
    (read_only,) = (row for row in read(text) if row["route"] == "`GET /v1/splitinfer/dials`" and "key" in row)
    assert (read_only["key"], read_only["session"], read_only["key for dials"]) == ("200", "200", "200")


def test_a_key_for_figures_is_for_these_only(text: str):
    others = {"`DELETE /session`", "`GET /metrics`", "`HEAD /metrics`"}
    others |= {f"`{method} {path}" for method in ("GET", "HEAD") for path in OPEN}
    found = {row["route"]: row["key for figures"] for row in read(text) if "key for figures" in row}
    assert found == {route: "200" if route in others else "403" for route in found}
