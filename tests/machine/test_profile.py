"""Profiles go into plain numbers and back, and refuse what cannot be."""

import json
import re
from dataclasses import replace

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.machine.costs import Costs, sentence
from splitinfer.machine.profile import DraftProfile, LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles

_COSTS = {"full": Costs.line(0.001, 0.0001), "sliding": Costs.line(0.002, 0.0001)}
_MODEL = ModelProfile(
    "some/model", (LayerProfile("full", 100, 2), LayerProfile("sliding", 50, 1, 8), LayerProfile("full", 100, 2)),
    embedding=30, head=40, hidden_row=16, draft=DraftProfile("ngram"),
)  # fmt: skip
_STUDIO = MachineProfile("studio", _COSTS, step=0.0005, head=Costs.line(0.003, 0.0), free_bytes=1000)
_MINI = replace(_STUDIO, name="mini", address="tcp://mini.local:5577")
_PROFILES = Profiles(_MODEL, (_STUDIO, _MINI), (LinkProfile("studio", "mini", 0.001, 1e9),))


def test_a_machine_survives_being_written_and_read() -> None:
    found = MachineProfile.from_dict(json.loads(json.dumps(_MINI.as_dict(), allow_nan=False)))
    assert found == _MINI
    assert found.layers["sliding"].at(Shape(rows=3)) == pytest.approx(0.0023)


def test_weights_of_a_stage() -> None:
    assert [_MODEL.weights(*cut) for cut in ((0, 1), (1, 2), (1, 3), (0, 3))] == [130, 50, 190, 320]
    tied = replace(_MODEL, is_tied=True, embedding=40)
    assert [tied.weights(*cut) for cut in ((0, 1), (1, 3), (0, 3))] == [140, 190, 290]
    assert _MODEL.kinds(0, 3) == {"full": 2, "sliding": 1}
    assert _MODEL.kinds(1, 1) == {}


def test_a_link_that_was_measured_one_way_serves_both() -> None:
    both = replace(_PROFILES, links=(*_PROFILES.links, LinkProfile("mini", "studio", 0.002)))
    assert [p.link("mini", "studio").latency for p in (_PROFILES, both)] == [0.001, 0.002]  # type: ignore[union-attr]
    assert _PROFILES.link("studio", "air") is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Profiles(_MODEL, (replace(_STUDIO, layers={"full": _COSTS["full"]}),)), "kind 'sliding'"),
        (lambda: replace(_STUDIO, layers={}), "layers: .* at least 1 item"),
        (lambda: replace(_STUDIO, draft=-1.0), "draft: .* greater than or equal to 0"),
        (lambda: MachineProfile.from_dict({"name": "a", "layers": {"k": {"points": [[1, -1]]}}}), "points.0.1: input"),
        (lambda: MachineProfile.from_dict({"name": "a", "layers": {"k": {"most_rows": 3}}}), "most_rows: unexpected"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        make()  # type: ignore[operator]
    assert re.search(words, sentence(caught.value)), sentence(caught.value)
