"""The dials of serving, and the cut, from outside: what may be asked, by whom, and that the engine goes by it."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from asgi import told
from raw_http import Said
from stub_model import Model

from splitinfer import SamplingParams
from splitinfer.core.layout import Layout, lay_out
from splitinfer.core.serving_options import SERVING_OPTIONS, ServingOptions
from splitinfer.errors import LayoutError, RequestError
from splitinfer.llm import LLM
from splitinfer.llm.rebalance import Rebalance
from splitinfer.placement.asked import Aim
from splitinfer.server.dials import changes_of, dials_document
from splitinfer.server.gate import Gate
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, digest
from splitinfer.server.problem import Problem
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

DIALS, PLAN = "/v1/splitinfer/dials", "/v1/splitinfer/plan"
OWNER, USER = "owner", "laptop"
KEYS = [ApiKey(OWNER, digest(OWNER), frozenset({Scope.ADMIN})), ApiKey(USER, digest(USER))]


@pytest.fixture
def tuned(llm: LLM) -> Iterator[LLM]:
    yield llm
    llm.tune(**dict.fromkeys(SERVING_OPTIONS))


@pytest.fixture
def service(tuned: LLM) -> Service:
    return Service(tuned, "demo", Gate(keys=ApiKeys(KEYS)))


def asked(service: Service, key: str | None, changes: Any = None, method: str = "PATCH", path: str = DIALS) -> Said:
    return told(make_app(service), path, changes, ("X-Api-Key", str(key)), method=method)


def read(service: Service, key: str | None = USER) -> tuple[dict[str, dict[str, Any]], bool]:
    said = asked(service, key, method="GET")
    assert said.status == 200
    document = json.loads(said.body)
    return {dial["name"]: dial for dial in document["dials"]}, document["may_change"]


@pytest.mark.parametrize(("name", "taken", "refused"), [
    ("policy", ["decode_first", None], ["fastest", "", 1, True, ["stall_free"], {}]),
    ("prefill_share", [0.01, 1, 0.5, None], [0, 0.009, 1.01, -1, math.nan, math.inf, "0.3", True, [], {"a": 1}]),
    ("token_budget", [1, 512, 64.0], [0, -5, 1.5, 10**30, "64", False, math.inf, math.nan]),
    ("itl_slo_ms", [40, 0.5], [0, -1, math.inf, 10**400, "40"]),
])  # fmt: skip
def test_what_a_dial_may_be(name: str, taken: list[Any], refused: list[Any]):
    for value in taken:
        (found,) = changes_of({name: value}).values()
        assert found == value
        assert type(found) in (str, float, type(None)) or SERVING_OPTIONS[name].kind is int
    for value in refused:
        with pytest.raises(Problem) as caught:
            changes_of({name: value})
        assert (caught.value.status, caught.value.param) == (400, name)
        assert caught.value.message.startswith(f"{name} must be {SERVING_OPTIONS[name].range}, not ")


def test_a_default_is_told_from_what_was_set():
    document = dials_document(ServingOptions(prefill_share=0.3), 128, 32, may_change=False)
    assert [dial["name"] for dial in document["dials"]] == list(SERVING_OPTIONS)
    found = {dial["name"]: (dial["value"], dial["in_force"]) for dial in document["dials"]}
    assert found["prefill_share"] == (0.3, 0.3)
    assert found["policy"] == (None, "stall_free")
    assert (found["token_budget"], found["max_running"]) == ((None, 128), (None, 32))
    assert found["itl_slo_ms"] == (None, None)
    json.dumps(document, allow_nan=False)


def test_only_the_scope_admin_turns_them(service: Service, llm: LLM):
    assert "lacks the scope admin" in asked(service, USER, {"prefill_share": 0.25}).body.decode()
    assert llm.serving_options.prefill_share is None
    assert read(service, USER)[1] is False
    assert read(service, OWNER)[1] is True
    said = asked(service, OWNER, {"prefill_share": 0.25, "max_running": 3})
    assert said.status == 200, said.body
    assert (llm.serving_options.prefill_share, llm.max_running) == (0.25, 3)
    assert json.loads(said.body) == json.loads(asked(service, OWNER, method="GET").body)


def test_the_engine_goes_by_them_and_defaults_come_back(service: Service, llm: LLM):
    before, _ = read(service)
    said = asked(service, OWNER, {"policy": "prefill_first", "token_budget": 7})
    assert said.status == 200
    llm.generate([5, 6, 7], SamplingParams(max_tokens=1))  # behind it: the engine has heard of them
    stats = llm.stats()
    assert (stats["policy"], stats["token_budget"]) == ("prefill_first", 7)
    dials, _ = read(service)
    assert (dials["token_budget"]["value"], dials["token_budget"]["in_force"]) == (7, 7)
    assert asked(service, OWNER, {"policy": None, "token_budget": None}).status == 200
    llm.generate([5, 6, 7], SamplingParams(max_tokens=1))
    assert read(service)[0] == before
    assert llm.stats()["token_budget"] == before["token_budget"]["in_force"] > 7


def test_of_several_changes_all_are_made_or_none(service: Service, llm: LLM):
    for changes, word in (({"prefill_share": 0.5, "max_running": 0}, "max_running must be"),
                          ({"prefill_share": 0.5, "speed": 1}, "there is no dial 'speed'; there are policy, "),
                          ({"prefill_share": 0.5, "kv_low": 0.95}, "kv_low and kv_high must be"),
                          (b'{"prefill_share": NaN}', "NaN"), (b"[1]", "must be a JSON object"),
                          (b"", "the body")):  # fmt: skip
        said = asked(service, OWNER, changes)
        assert said.status == 400
        assert word in json.loads(said.body)["error"]["message"]
        assert llm.serving_options == ServingOptions(), changes


# -- the cut ---------------------------------------------------------------------------------------


class Cuttable(Model):
    """A pipeline of 6 and 6 layers, for which another cut may be better. ``fails``: what goes wrong."""

    def __init__(self, gain: float, fails: str = "") -> None:
        super().__init__()
        self.layout = Layout(lay_out([("a", 6, None), ("b", 6, "tcp://b:1")]), "m")
        self.gain, self.fails = gain, fails
        self.before: Layout | None = None

    def plan(self, aim: Aim) -> Rebalance:
        if self.fails == "plan":
            raise RequestError("no step has been computed yet")
        stages = lay_out([("a", 8, None), ("b", 4, "tcp://b:1")])
        return Rebalance(replace(self.layout, stages=stages), self.gain, f"better for {aim}")

    def follow(self, advice: Rebalance, _aim: Aim) -> float:
        if self.fails == "recut":
            raise LayoutError("it does not fit")
        self.before, self.layout = self.layout, advice.layout
        return 0.5

    def outcome(self, *, acts: bool) -> str | None:
        if self.before is None:
            return None
        if acts:
            self.layout, self.before, self.fails = self.before, None, "plan"
        return "It was slower."


def planned(llm: Any, key: str, body: Any = None, path: str = PLAN) -> Said:
    service = Service(llm, "m", Gate(keys=ApiKeys(KEYS)))
    return asked(service, key, body, "GET" if body is None else "POST", path)


def test_a_better_cut_is_told_and_loaded_by_whom_the_pipeline_obeys():
    llm = Cuttable(1.5)
    said = planned(llm, USER, path=f"{PLAN}?for=throughput")
    found = {"for": "throughput", "cut": "6-6", "best": "8-4", "gain": 1.5, "text": "better for throughput"}
    assert (said.status, json.loads(said.body)) == (200, {**found, "paused": None})
    assert planned(llm, USER, {}).status == 403
    assert llm.layout.cut == "6-6"
    assert json.loads(planned(llm, OWNER, {"for": "throughput"}).body) == {**found, "paused": 0.5}
    assert llm.layout.cut == "8-4"
    for _ in range(2):  # who only asks changes nothing
        assert json.loads(planned(llm, USER, path=PLAN).body)["text"] == "It was slower. better for chat"
        assert llm.layout.cut == "8-4"
    taken_back = {"for": "chat", "cut": "6-6", "best": "6-6", "gain": 1.0, "text": "It was slower.", "paused": None}
    assert json.loads(planned(llm, OWNER, {}).body) == taken_back


def test_what_is_not_worth_it_is_not_loaded():
    llm = Cuttable(1.01)
    assert json.loads(planned(llm, OWNER, {}).body)["paused"] is None
    assert llm.layout.cut == "6-6"


@pytest.mark.parametrize(("fails", "sentence"), [
    ("plan", "no step has been computed yet"), ("recut", "the cut in force is still 6-6: it does not fit"),
])  # fmt: skip
def test_what_cannot_be_compared_or_loaded_is_a_sentence(fails: str, sentence: str):
    said = planned(Cuttable(2.0, fails), OWNER, {})
    assert (said.status, json.loads(said.body)["error"]["message"]) == (409, sentence)


@pytest.mark.parametrize("body", [{"for": "speed"}, {"for": 3}, {"cut": [1, 2]}])
def test_what_is_no_aim_is_refused(body: dict[str, Any]):
    assert planned(SimpleNamespace(), OWNER, body).status == 400
