"""bench --mode serve, --mode kv and --mode wire from end to end on small models, and their arithmetic."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import brief
import mlx.core as mx
import pytest
import tiny
import yaml
from effort import thorough

from splitinfer.bench.serving.run import DIAL, jobs_of
from splitinfer.bench.shared.fidelity import Fidelity
from splitinfer.machine.files import read_machine
from splitinfer.sim.workload import Arrival

LINKS = (("as it is", "none"), ("slow", "none"), ("slow", "int8"))  # of seven: each is a pipeline
REQUESTS = thorough(2, 4)
FEWER = {
    "serve": {"serving.run._WARM_UP": 10, "serving.run._BEFORE": 15, "serving.run.DIAL": (0.1, 1.0)},
    "wire": {"wire._LENGTH": 80, "wire._SYSTEMS": LINKS},
    "kv": {"kv._TEXTS": 3, "kv._LENGTH": 120},
}
pytestmark = pytest.mark.timeout(300)  # while the machine is busy; each takes 20 s alone


def bench(mode: str, folder: Path, tmp_path: Path, *options: str) -> tuple[dict[str, object], str]:
    layout = {"model": str(folder), "stages": [{"name": "a", "layers": 2}, {"name": "b", "layers": 2}]}
    layout["stages"][1]["address"] = "local"  # type: ignore[index]
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(layout))
    command = brief.command(["--mode", mode, "--layout", str(path), *options], FEWER[mode])
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout


def test_serving_a_tiny_model(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    picture = tmp_path / "serve.png"
    found, text = bench(
        "serve", tiny_folder("llama"), tmp_path, "--trials", "1", "--prompt-tokens", "120", "--streams", "2",
        "--requests", str(REQUESTS), "--scale", "0.02", "--plot", str(picture), *thorough(["--rate", "20"], []),
    )  # fmt: skip
    stall = found["stall"]["trials"][0]  # type: ignore[index]
    systems = stall["systems"]
    assert set(systems) == {
        "stall_free", "stall_free, no objective", "prefill_first", "mlx-lm BatchGenerator"
    }  # fmt: skip
    assert all(each["ttft"] > 0 and each["itl"]["max"] > 0 and each["gaps"] for each in systems.values())
    names = [point["name"] for point in found["arrivals"]]  # type: ignore[attr-defined]
    assert {"stall_free", "prefill_first", "watermark", "decode_first", "mlx-lm BatchGenerator"} <= set(names)
    for point in [*found["arrivals"], *found["dial"]]:  # type: ignore[misc]
        assert point["live"]["num_requests"] == REQUESTS
        if "simulated" in point:
            assert point["simulated"]["num_tokens"] == point["live"]["num_tokens"]
    assert [point["prefill_share"] for point in found["dial"]] == thorough([0.1, 1.0], list(DIAL))  # type: ignore[attr-defined]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "BatchGenerator" in text
    measured = tmp_path / "machine.json"
    measured.write_text(text)
    assert read_machine(measured).layers == (2, 2)


def test_codecs_on_the_links_of_a_tiny_model(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", "llama", vocab_size=160)
    found, text = bench("wire", folder, tmp_path, "--trials", "1", "--prompt-tokens", "40", "--texts", "1")
    rows = found["rows"]["codecs"]  # type: ignore[index]
    assert list(rows) == ["none", "fp16", "fp8", "int8"]
    assert rows["fp8"]["to_fp16"] <= 0.53
    assert rows["int8"]["to_fp16"] <= 0.53
    assert rows["int8"]["off"]["spike 3e5"]["usual"] < 0.02
    assert rows["fp16"]["off"]["spike 3e5"]["fit"] == 0
    read = {(each["cut"], each["codec"]): each for each in found["fidelity"]}  # type: ignore[attr-defined]
    assert {cut for cut, _ in read} == {1, 2, 3}
    assert all(read[cut, "none"]["largest_logprob_difference"] == 0 for cut in (1, 2, 3))
    assert all(0 < read[cut, "fp8"]["mean_kl"] < 0.1 for cut in (1, 2, 3))
    prompts = {(each["link"], each["codec"]): each for each in found["prompts"]}  # type: ignore[attr-defined]
    assert prompts["slow", "int8"]["bytes_per_token"] < prompts["slow", "none"]["bytes_per_token"]
    assert all(each["ttft"]["median"] > 0 for each in prompts.values())
    assert "the slow link carries" in text


def test_kv_formats_of_a_tiny_model(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", "llama", head_dim=64, vocab_size=160)
    found, _ = bench("kv", folder, tmp_path, "--trials", "1", "--prompt-tokens", "64", "--decode-tokens", "6")
    formats = found["formats"]
    assert formats["exact"]["bytes_to_exact"] == 1.0  # type: ignore[index]
    assert formats["k8v8"]["bytes_to_exact"] == pytest.approx(0.28125)  # type: ignore[index]
    assert 0 < formats["k8v8"]["mean_kl"] < formats["k8v4"]["mean_kl"]  # type: ignore[index]
    assert formats["k8v8"]["positions"] > thorough(300, 1000)  # type: ignore[index]


def test_the_same_distribution_is_no_different() -> None:
    exact = mx.log(mx.softmax(mx.random.normal((6, 11), key=mx.random.key(1)), axis=-1))
    fidelity = Fidelity()
    fidelity.add(exact, exact, [1, 2, 3, 4, 5, 6])
    found = fidelity.as_dict()
    assert (found["mean_kl"], found["top1_agreement"], found["perplexity_change_percent"]) == (
        pytest.approx(0, abs=1e-6), 1.0, 0.0
    )  # fmt: skip


def test_fidelity_of_two_coins() -> None:
    """p = (3/4, 1/4) against q = (1/4, 3/4), on a text of the first side."""
    p, q = mx.log(mx.array([[0.75, 0.25]] * 3)), mx.log(mx.array([[0.25, 0.75]] * 3))
    fidelity = Fidelity()
    fidelity.add(p, q, [0, 0, 0])
    found = fidelity.as_dict()
    assert found["mean_kl"] == pytest.approx(0.5 * math.log(3))
    assert found["top1_agreement"] == 0.0
    assert found["perplexity"] == pytest.approx(4 / 3)
    assert found["perplexity_change_percent"] == pytest.approx(200)


def test_jobs_are_the_same_for_everybody() -> None:
    arrivals = (Arrival(0.5, 7, 3), Arrival(1.0, 4, 9))
    jobs = jobs_of(arrivals, 50, seed=1)
    assert [(job.at, len(job.prompt), job.max_tokens) for job in jobs] == [(0.5, 7, 3), (1.0, 4, 9)]
    assert jobs == jobs_of(arrivals, 50, seed=1)
    assert jobs != jobs_of(arrivals, 50, seed=2)
