"""What a GPU could show: the document, and each of the parts, tiny, on the CPU backend."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gpu_figures.__main__ import PARTS, gpu_probes, measure_on_gpu
from random_model import Shape

from splitinfer.errors import ConfigError
from splitinfer.machine.selection import VARIABLE as ACCELERATOR
from splitinfer.probes.child import ProbeResult, serve
from splitinfer.probes.finding import Finding, Outcome, passed
from splitinfer.probes.registry import ProbeEntry, selftest_probes

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("size", ["full", "small", "tiny"])
def test_every_probe_is_one_that_can_be(size: str):
    probes = gpu_probes(size)
    assert [name for name in PARTS if not any(probe.title == name for probe in probes)] == []
    assert len({probe.name for probe in probes}) == len(probes)
    for probe in (*probes, *selftest_probes({"address": "tcp://mini:5577"})):
        module, _, function = probe.function.partition(":")
        assert callable(getattr(importlib.import_module(module, "splitinfer.probes"), function))
        assert json.dumps(dict(probe.options))
        if shape := probe.options.get("shape"):
            assert max(probe.options.get("layers", [0])) <= Shape(**shape).layers


# -- the probes, in this process ---------------------------------------------------------------------------------------


def in_process(function: str, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The numbers that a probe finds, here."""
    lines: list[dict[str, Any]] = []
    assert serve(json.dumps({"function": function, "options": options}), lines.append) == 0
    found = [line["found"] for line in lines if "found" in line]
    assert [one["sentence"] for one in found if one["outcome"] == "failed"] == []
    return {one["name"]: one["numbers"] for one in found}


def first(part: str, **options: Any) -> dict[str, Mapping[str, Any]]:
    """What a part's first probe finds, tiny."""
    probe = gpu_probes("tiny", [part])[0]
    return in_process(probe.function, {**probe.options, **options})


def test_support_on_the_cpu_is_equal_to_the_last_bit():
    found = first("support")
    assert found["llama, float32"] == {
        "is_number": True, "to_mlx_lm": 0.0, "to_mlx_lm_without_cache": pytest.approx(0.0, abs=1e-5), "way": "rows",
        "kept_kv": True, "split_to_whole": 0.0, "equal": True,
    }  # fmt: skip
    assert (found["summary, float32"]["configurations"], found["summary, float32"]["equal"]) == (2, 2)


def test_launch_on_the_cpu_takes_most_of_a_step():
    found = first("launch")
    assert list(found) == [f"{kind}, {n} layers" for kind in ("bfloat16", "4-bit") for n in (1, 2)]
    for one in found.values():
        assert 0 < one["share"]["p50"] <= 1
        assert one["launch_ms"]["count"] == 3


def test_send_has_every_kind_of_result():
    found = first("send")
    assert set(found) == {
        "hidden states", "prompts as int8", "prompts as int8, one of which does not fit", "tokens",
        "log-probabilities",
    }  # fmt: skip
    for name, one in found.items():
        assert one["until_sent_ms"]["count"] == 3
        assert 0 <= one["until_sent_ms"]["p50"] < 1000
        assert bool(one["unfit_rows"]) is ("does not fit" in name)


# -- the document ------------------------------------------------------------------------------------------------------


class Planted:
    """Runs no process: those of ``rows`` fail. ``environments``: of each."""

    def __init__(self, gpu: bool = False) -> None:
        self.device, self.environments = {"gpu": gpu, "device": "a card" if gpu else "cpu"}, list[dict[str, str]]()

    def __call__(
        self, probe: ProbeEntry, limit: float, *_: Any, environment: dict[str, str], **_more: Any
    ) -> ProbeResult:
        self.environments.append(environment)
        found = passed("device", "", self.device) if probe.name == "about" else passed("a", "", {"ms": 1.0})
        ending = Finding("", Outcome.FAILED, "failed: on purpose")
        return ProbeResult((found,), ending if probe.title == "rows" else None, 0.1, limit)


def test_the_document_has_every_part_and_what_went_wrong(tmp_path: Path):
    out = tmp_path / "document.json"
    found = measure_on_gpu(size="tiny", out=out, run=Planted())
    assert list(found["parts"]) == [probe.name for probe in gpu_probes("tiny")]
    assert found["parts"]["send, a random model"]["found"] == {"a": {"ms": 1.0}}
    assert found["parts"]["rows, dense, bfloat16"]["problem"] == "failed: on purpose"
    assert found["problems"][0] == "rows, dense, bfloat16: failed: on purpose"
    assert len(found["problems"]) == 4
    assert json.loads(out.read_text()) == found
    assert list(tmp_path.iterdir()) == [out]


def test_what_computes_decides_the_size_and_the_environment():
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    for options, gpu, size, environment in (
        ({}, True, "full", {}), ({"on": "cpu"}, False, "small", hidden),
        ({"accelerator": "two-large"}, False, "small", {**hidden, ACCELERATOR: "two-large"}),
    ):  # fmt: skip
        run = Planted(gpu)
        found = measure_on_gpu(["send"], run=run, **options)  # type: ignore[arg-type]
        assert (found["size"], run.environments) == (size, [environment] * 2)


@pytest.mark.parametrize(("on", "gpu", "words"), [("gpu", False, "finds no GPU"), ("cpu", True, "cannot be kept")])
def test_what_should_compute_has_to_be_there(on: str, gpu: bool, words: str):
    with pytest.raises(ConfigError, match=words):
        measure_on_gpu(["send"], on=on, run=Planted(gpu))
