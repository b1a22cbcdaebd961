"""The command, on this machine: with nothing, with workers of its own, with some that are not there, and with keys."""

import json
from pathlib import Path
from typing import Any

import pytest
import stages
import yaml
from processes import Running, worker
from test_keys import address, beyond_loopback, key, keyring

from splitinfer.config import Layout
from splitinfer.engine.versions import own_versions
from splitinfer.engine.worker import handshake as acceptor
from splitinfer.keyring import Keyring
from splitinfer.probes.doctor import sums_in_words, survey_layout
from splitinfer.probes.links import Hidden, hidden_of
from splitinfer.wire.messages import Versions


def write(folder: Path, *addresses: str, **more: Any) -> Path:
    found: list[dict[str, Any]] = [{"name": "a", "layers": 4}]
    found += [{"name": f"w{i}", "layers": 4, "address": each} for i, each in enumerate(addresses, 1)]
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"stages": found, **more}))
    return path


def doctor(*args: str) -> tuple[int, Running]:
    running = Running("doctor", *args)
    try:
        return running.wait(60), running
    finally:
        running.end()


def test_this_machine() -> None:
    code, running = doctor()
    assert code == 0
    assert "This machine: " in running.out
    assert f"mlx {own_versions().mlx}" in running.out
    assert "RDMA over Thunderbolt" in running.out


def test_local_workers_are_started_measured_and_ended(tmp_path: Path) -> None:
    code, running = doctor("--layout", str(write(tmp_path, "local", "local", model="demo")), "--json")
    assert code == 0, running.err
    assert running.children() == []
    whole = json.loads(running.out)
    assert whole["machine"]["version_mlx"] == own_versions().mlx
    assert whole["machine"]["memory_bytes"] > whole["machine"]["free_bytes"] > 0
    assert whole["rdma"]["verdict"]["outcome"] in ("passed", "not available", "unknown")
    assert all(set(each) == {"name", "outcome", "sentence", "remedy"} for each in whole["findings"])
    assert isinstance(whole["origin"], str)
    found = whole["layout"]
    assert [worker["problem"] for worker in found["workers"]] == ["", ""]
    assert [(link["source"], link["target"], link["carries"]) for link in found["links"]] == [
        ("a", "w1", "hidden states"), ("w1", "w2", "hidden states"), ("w2", "a", "results")
    ]  # fmt: skip
    for link in found["links"]:
        figures = link["figures"]
        assert 0 < figures["latency_p50"] <= figures["latency_p99"]
        assert figures["down"] is None or figures["down"] > 0
    assert (found["hidden"]["values"], found["hidden"]["source"]) == (192, "demo")
    steps = [link["figures"]["latency_p50"] for link in found["links"]]
    assert found["token_seconds"] >= sum(steps)


@pytest.mark.nightly
def test_a_stage_across_two_machines(tmp_path: Path) -> None:
    """Both ranks are reached, the way of their sums is measured, and what they cost is said."""
    path = tmp_path / "both.yaml"
    stage_list = [{"name": "both", "layers": 12, "across": ["local", "local"]}]
    path.write_text(yaml.safe_dump({"stages": stage_list, "model": "demo"}))
    code, running = doctor("--layout", str(path), "--json")
    assert code == 0, running.err
    found = json.loads(running.out)["layout"]
    assert [(worker["name"], worker["problem"]) for worker in found["workers"]] == [("both/0", ""), ("both/1", "")]
    assert [(link["source"], link["target"], link["carries"]) for link in found["links"]] == [
        ("coordinator", "both/0", "steps"), ("both/0", "both/1", "sums"), ("both/1", "coordinator", "results")
    ]  # fmt: skip
    (said,) = found["sums"]
    assert said.startswith("both: about 24 sums a token, each some ")


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        (["local", "tcp://127.0.0.1:5577"], None),
        (["local", "tcp://127.0.0.1:5577#" + "a" * 64], "both: the links to its workers are encrypted, its sums"),
        (["local", "tcp://198.51.100.2:5577"], "The sums of stage both would cross the network at 198.51.100.2"),
        (["local", "local"], None),
    ],
)
def test_sums_that_others_may_read(addresses: list[str], said: str | None) -> None:
    found = list(sums_in_words(Layout.from_dict({"stages": [{"name": "both", "layers": 4, "across": addresses}]}), []))
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(said)


def test_a_worker_that_is_not_there(tmp_path: Path) -> None:
    """The rest is measured and printed all the same."""
    with worker() as there:
        path = write(tmp_path, there.address, "tcp://127.0.0.1:9")
        code, running = doctor("--layout", str(path), "--connect-timeout", "0.5")
        assert code == 1
        assert "✓ w1" in running.out
        assert "✗ w2 (tcp://127.0.0.1:9): worker w2 is not at tcp://127.0.0.1:9" in running.out
        assert "a → w1" in running.out
        assert "the machine at 127.0.0.1 answers, but nothing listens on that port; start it there" in running.out
        assert "w1 → w2: not measured: w2 is not reached" in running.out
        assert "w2 → a: not measured" in running.out
        assert "to each generated token" not in running.out
        assert running.err == ""


def test_another_version_is_one_sentence() -> None:
    older = Versions(own_versions().protocol - 1, "0", "0", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptor, "own_versions", lambda: older)
        with stages.worker("inproc") as there:
            layout = Layout.from_dict(stages.layout("demo", [6, 6], [there]))
            result = survey_layout(layout, 5, lambda _: None)
    (seen,) = result.workers
    assert "the worker runs another version (protocol" in seen.problem
    assert result.links[0].problem == seen.problem


@pytest.mark.nightly
def test_links_with_keys(tmp_path: Path) -> None:
    """Two encrypted workers that do not know each other: the second is told whom to expect."""
    with beyond_loopback(tmp_path, "mini") as mini, beyond_loopback(tmp_path, "air") as air:
        stage_list: list[dict[str, Any]] = [{"name": "a", "layers": 1}]
        for name, each in (("w1", mini), ("w2", air)):
            stage_list.append({"name": name, "layers": 1, "address": address(each), "key": key(each)})
        layout = Layout.from_dict({"stages": stage_list})
        refused = survey_layout(layout, 2, lambda _: None)
        assert all("admit this machine there: splitinfer pair" in each.problem for each in refused.workers)
        for name in ("mini", "air"):
            keyring(tmp_path, name).admit(Keyring().own().public, "studio")
        report = survey_layout(layout, 5, lambda _: None)
        assert report.is_whole, report
        assert {link.transport for link in report.links} == {"tcp (encrypted)"}


def test_a_models_width_is_read_where_it_lies(tmp_path: Path) -> None:
    def of(model: str | None, **more: Any) -> Hidden:
        layout = Layout.from_dict({"stages": [{"name": "a", "layers": 1}], **more})
        return hidden_of(layout if model is None else layout.with_model(model))

    (tmp_path / "config.json").write_text('{"model_type": "x", "text_config": {"hidden_size": 640}}')
    assert of(str(tmp_path)).values == 640
    assert of("demo").values == 192
    assert of("demo", dtype="bfloat16").num_bytes == 384
    for none in (None, "nobody/no-such-model", "no model\0", "~nobody-of-that-name/x", "a" * 5000):
        assert of(none).source == "assumed"
    for text in ('{"model_type": "x", "hidden_size": "wide"}', "{"):
        (tmp_path / "config.json").write_text(text)
        assert of(str(tmp_path)).source == "assumed"
