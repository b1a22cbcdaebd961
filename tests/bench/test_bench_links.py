"""`splitinfer bench --mode link` as a process, and the ends of its links."""

import json
from collections.abc import Iterator

import psutil
import pytest

from splitinfer.bench import link as links
from splitinfer.bench.link import kinds
from splitinfer.bench.modes import measure
from splitinfer.bench.shared.link_pair import Kind, Pair
from splitinfer.bench.shared.options import Options
from splitinfer.errors import PeerError


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SIZES", {"4 KB": (4096, 20), "4 MB": (4 * 2**20, 4)})
    monkeypatch.setattr(links, "_IDLE_SECONDS", 0.5)


@pytest.mark.nightly
def test_a_table_and_a_document(brief: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children())
    assert measure("link", Options(trials=2)) == 0
    assert set(psutil.Process().children()) == before
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert list(found["links"])[:2] == ["bare ZeroMQ", "tcp"]
    assert set(found["links"]) | set(found["left_out"]) == {kind.name for kind in kinds()}
    for name, link in found["links"].items():
        for size in ("4 KB", "4 MB"):
            figures = link[size]
            assert len(figures["p50"]["values"]) == 2
            assert 0 < figures["p50"]["median"] <= figures["p99"]["median"] < 5
            assert (figures["p50_to_bare"]["median"] == 1) == (name == "bare ZeroMQ")
        rates, seconds = (link["4 MB"][what]["values"] for what in ("bytes_per_second", "p50"))
        assert rates == pytest.approx([2 * 4 * 2**20 / each for each in seconds])
        assert 0 <= link["idle_share"] < 0.5
    assert any("bandwidth, wanted is 0.7 at least" in line for line in lines)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(Kind("tcp, encrypted", "tcp://127.0.0.1:0", curve=True))
    yield made
    made.close()


def test_the_beginning_is_not_counted(pair: Pair) -> None:
    assert len(pair.round_trips(100, 20)) == 18
    assert all(seconds > 0 for seconds in pair.round_trips(100_000, 5))


def test_an_end_that_dies_is_said(pair: Pair) -> None:
    psutil.Process(pair._ends[1].pid).kill()
    with pytest.raises(PeerError, match="tcp, encrypted: LinkClosed"):
        pair.round_trips(10, 100_000)
