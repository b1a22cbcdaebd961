"""The dashboard and the alerts ask for what is told, by labels that are there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from figures import DRAFTS, HEALTH, STATS, Model

from splitinfer.server.meters.collector import Readings, ServerReadings
from splitinfer.server.meters.http import HttpMeters

FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "grafana"
HTTP = HttpMeters()
HTTP.responded("/v1/messages", 200)
READINGS = Readings("demo", 300, "0", "two", STATS | {"speculation": DRAFTS}, Model().request_figures(), HTTP, HEALTH)
NAME = re.compile(r"\b((?:vllm|splitinfer):\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")
OF_PROMETHEUS = {"instance", "job", "le"}


def series() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for sample in (
        sample for family in ServerReadings("demo", HTTP.responses, [READINGS]).collect() for sample in family.samples
    ):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> Iterator[str]:
    text = json.loads((FOLDER / "dashboard.json").read_text())
    yield from (target["expr"] for panel in text["panels"] for target in panel.get("targets", ()))
    yield from (each["query"]["query"] for each in text["templating"]["list"] if each["type"] == "query")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"] for rule in group["rules"]]


def unknown(query: str) -> set[str]:
    known, wrong, labels = series(), set[str](), set(OF_PROMETHEUS)
    for name, matchers in NAME.findall(query):
        matched = set(re.findall(r"(\w+)=", matchers))
        labels |= known.get(name, set())
        wrong |= {name} - known.keys() | matched - known.get(name, set())
    grouped = {label.strip() for group in BY.findall(query) for label in group.split(",")}
    return wrong | grouped - labels


def test_every_query_asks_for_what_is_told():
    queries = [*dashboard(), *(rule["expr"] for rule in rules())]
    assert len(queries) > 40
    assert {query: wrong for query in queries if (wrong := unknown(query))} == {}


def test_every_alert_is_tried_and_says_what_is_wrong():
    tried = {
        each["alertname"]
        for test in yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]
        for each in test["alert_rule_test"]
        if each["exp_alerts"]
    }
    assert {rule["alert"] for rule in rules()} == tried
    for rule in rules():
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        names = {name for name, _ in NAME.findall(rule["expr"])}
        told = set[str]().union(*(series()[name] for name in names))
        assert named <= told | OF_PROMETHEUS, "a label that the alert does not have"
