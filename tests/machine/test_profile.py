"""Profiles go into plain numbers and back, and refuse what cannot be."""

import json
import math
from dataclasses import replace

import pytest

from splitinfer.core.scheduler.cost_model import Shape, StageCosts
from splitinfer.machine.profile import (
    DraftProfile,
    LayerProfile,
    LinkProfile,
    MachineProfile,
    ModelProfile,
    Profiles,
)

_COSTS = {"full": StageCosts.line(0.001, 0.0001), "sliding": StageCosts.line(0.002, 0.0001)}
_MODEL = ModelProfile(
    "some/model", (LayerProfile("full", 100, 2), LayerProfile("sliding", 50, 1, 8), LayerProfile("full", 100, 2)),
    embedding=30, head=40, hidden_row=16, draft=DraftProfile("ngram"),
)  # fmt: skip
_STUDIO = MachineProfile("studio", _COSTS, step=0.0005, head=StageCosts.line(0.003, 0.0), free_bytes=1000)
_MINI = replace(_STUDIO, name="mini", address="tcp://mini.local:5577")
_PROFILES = Profiles(_MODEL, (_STUDIO, _MINI), (LinkProfile("studio", "mini", 0.001, 1e9),))


def test_profiles_survive_being_written_and_read() -> None:
    numbers = json.loads(json.dumps(_PROFILES.as_dict(), allow_nan=False))
    found = Profiles.from_dict(numbers)
    assert found.as_dict() == _PROFILES.as_dict()
    assert found.model == _MODEL
    assert found.links == _PROFILES.links
    assert found.machines[1].layers["sliding"].at(Shape(rows=3)) == pytest.approx(0.0023)


def test_a_bandwidth_without_bound_is_a_number_of_json() -> None:
    link = LinkProfile("a", "b", 0.001)
    numbers = json.loads(json.dumps(link.as_dict(), allow_nan=False))
    assert LinkProfile.from_dict(numbers) == link
    assert math.isinf(link.bytes_per_second)


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
    assert _PROFILES.only(["mini"]).links == ()
    assert _PROFILES.only(["mini", "studio"]).machines == (_MINI, _STUDIO)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Profiles(_MODEL, ()), "there must be a machine"),
        (lambda: Profiles(_MODEL, (_STUDIO, _STUDIO)), "its own name"),
        (lambda: Profiles(_MODEL, (replace(_STUDIO, layers={"full": _COSTS["full"]}),)), "'sliding'"),
        (lambda: Profiles(_MODEL, (_STUDIO,), (LinkProfile("studio", "mini", 0.1),)), "'mini'"),
        (lambda: replace(_STUDIO, layers={}), "machine studio has the costs of no kind of layer"),
        (lambda: replace(_STUDIO, draft=-1.0), "draft must not be negative"),
        (lambda: replace(_MODEL, layers=()), "at least one layer"),
        (lambda: LayerProfile("a", -1), "weights must not be negative, but is -1"),
        (lambda: LinkProfile("a", "b", 0.1, 0.0), "carries no bytes"),
        (lambda: Profiles.from_dict({}), "KeyError: 'version'"),
        (lambda: Profiles.from_dict({**_PROFILES.as_dict(), "version": 9}), "version 9, not 1; measure anew"),
        (lambda: Profiles.from_dict({**_PROFILES.as_dict(), "machines": [{}]}), "no profile of a machine"),
        (lambda: Profiles.from_dict({**_PROFILES.as_dict(), "links": [{"from": 1}]}), "no profile of a link"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()  # type: ignore[operator]
