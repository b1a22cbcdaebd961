"""Links beside bare ZeroMQ, as a process, and how one is measured."""

import json
import math
from collections.abc import Iterator

import psutil
import pytest

from scripts.comparing import links
from scripts.comparing.links import Kind, Pair, kinds
from splitinfer.bench.report import print_found
from splitinfer.errors import PeerError


@pytest.mark.nightly
def test_a_table_and_a_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(links, "PROBES", 2)
    before = set(psutil.Process().children())
    measured = links.measure(2)
    print_found(measured, links.tables(measured))
    assert set(psutil.Process().children()) == before
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert list(found["links"])[:2] == ["bare ZeroMQ", "tcp"]
    assert set(found["links"]) | set(found["left_out"]) == {kind.name for kind in kinds()}
    for name, link in found["links"].items():
        assert len(link["latency_p50"]["values"]) == 2
        assert 0 < link["latency_p50"]["median"] <= link["latency_p99"]["median"] < 5
        assert (link["latency_to_bare"]["median"] == 1) == (name == "bare ZeroMQ")
        assert (link["down"]["median"] or math.inf) > 0  # JSON has no infinity


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(Kind("tcp, encrypted", "tcp://127.0.0.1:0", curve=True))
    yield made
    made.close()


def test_a_link_is_measured_as_often_as_is_asked(pair: Pair) -> None:
    assert [each.down > 0 < each.latency_p50 for each in pair.probe(2)] == [True, True]


def test_an_end_that_dies_is_said(pair: Pair) -> None:
    psutil.Process(pair._other.pid).kill()
    with pytest.raises(PeerError, match="tcp, encrypted: LinkClosed"):
        pair.probe(1000)
