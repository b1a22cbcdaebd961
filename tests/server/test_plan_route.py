"""The cut of a running server, compared and loaded from outside."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from asgi import told
from raw_http import Said
from stub_model import Model

from splitinfer.core.layout import Layout, lay_out
from splitinfer.errors import LayoutError, RequestError
from splitinfer.llm.rebalance import Rebalance
from splitinfer.placement.asked import Aim
from splitinfer.server.gate import Gate
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, digest
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

PATH = "/v1/splitinfer/plan"
OWNER, USER = "owner", "laptop"
KEYS = [ApiKey(OWNER, digest(OWNER), frozenset({Scope.ADMIN})), ApiKey(USER, digest(USER))]


class Cuttable(Model):
    """A pipeline of 6 and 6 layers, for which another cut may be better. ``fails``: what goes wrong."""

    def __init__(self, gain: float, fails: str = "") -> None:
        super().__init__()
        self.layout = Layout(lay_out([("a", 6, None), ("b", 6, "tcp://b:1")]), "m")
        self.gain, self.fails = gain, fails

    def plan(self, aim: Aim) -> Rebalance:
        if self.fails == "plan":
            raise RequestError("no step has been computed yet")
        stages = lay_out([("a", 8, None), ("b", 4, "tcp://b:1")])
        return Rebalance(replace(self.layout, stages=stages), self.gain, f"better for {aim}")

    def recut(self, layout: Layout) -> float:
        if self.fails == "recut":
            raise LayoutError("it does not fit")
        self.layout = layout
        return 0.5


def asked(llm: Any, key: str, query: str = "", body: Any = None) -> Said:
    service = Service(llm, "m", Gate(keys=ApiKeys(KEYS)))
    return told(make_app(service), PATH + query, body, ("X-Api-Key", key))


def test_a_better_cut_is_told_and_loaded_by_whom_the_pipeline_obeys():
    llm = Cuttable(1.5)
    said = asked(llm, USER, "?for=throughput")
    found = {"for": "throughput", "cut": "6-6", "best": "8-4", "gain": 1.5, "text": "better for throughput"}
    assert (said.status, json.loads(said.body)) == (200, {**found, "paused": None})
    assert asked(llm, USER, body={}).status == 403
    assert llm.layout.cut == "6-6"
    assert json.loads(asked(llm, OWNER, body={"for": "throughput"}).body) == {**found, "paused": 0.5}
    assert llm.layout.cut == "8-4"


def test_what_is_not_worth_it_is_not_loaded():
    llm = Cuttable(1.01)
    assert json.loads(asked(llm, OWNER, body={}).body)["paused"] is None
    assert llm.layout.cut == "6-6"


@pytest.mark.parametrize(("fails", "sentence"), [
    ("plan", "no step has been computed yet"), ("recut", "the cut in force is still 6-6: it does not fit"),
])  # fmt: skip
def test_what_cannot_be_compared_or_loaded_is_a_sentence(fails: str, sentence: str):
    said = asked(Cuttable(2.0, fails), OWNER, body={})
    assert (said.status, json.loads(said.body)["error"]["message"]) == (409, sentence)


@pytest.mark.parametrize("body", [{"for": "speed"}, {"for": 3}, {"cut": [1, 2]}])
def test_what_is_no_aim_is_refused(body: dict[str, Any]):
    assert asked(SimpleNamespace(), OWNER, body=body).status == 400
