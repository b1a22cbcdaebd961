"""Profiles described by hand, and as they were measured."""

import json
from pathlib import Path

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.errors import ConfigError
from splitinfer.machine.files import EXAMPLES, read_profiles

_TEXT = """
model:
  name: some/model
  layers: [{count: 2, kind: full, weights_gb: 0.5, kv_bytes_per_token: 8}, {kind: sliding, weights_gb: 0.25}]
  repeat: 3
  head_gb: 0.1
machines:
  - name: studio
    free_gb: 40
    kinds: {full: {rows_ms: {1: 1, 512: 50}}, sliding: {rows_ms: {1: 2}}}
    each_step_ms: 0.5
    draft_ms: 3
    launches_ahead: true
    wait_us: 20
  - {name: mini, address: "tcp://mini:1", like: studio, times: 2, free_gb: 20}
links: [{from: studio, to: mini, latency_ms: 2, mb_per_second: 100}]
"""


def _written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "machines.yaml"
    file.write_text(text)
    return file


def test_a_description(tmp_path: Path):
    found = read_profiles(_written(tmp_path, _TEXT))
    studio, mini = found.machines
    assert [layer.kind for layer in found.model.layers] == ["full", "full", "sliding"] * 3
    assert found.model.weights(0, 9) == round(3 * 1.25e9 + 0.1e9)
    assert studio.layers["full"].at(Shape(1)) == pytest.approx(0.001)
    assert mini.layers["full"].at(Shape(512)) == pytest.approx(0.1)
    assert (mini.step, mini.draft) == pytest.approx((0.001, 0.006))
    assert (mini.free_bytes, mini.address, mini.launches_ahead) == (20 * 10**9, "tcp://mini:1", True)
    assert mini.device == studio.device
    link = found.link("studio", "mini")
    assert link is not None
    assert (link.latency, link.bytes_per_second) == (0.002, 100e6)


def test_what_was_measured_is_read_back(tmp_path: Path):
    found = read_profiles(_written(tmp_path, _TEXT))
    assert read_profiles(_written(tmp_path, json.dumps(found.as_dict()))).as_dict() == found.as_dict()


@pytest.mark.parametrize("example", sorted((EXAMPLES / "profiles").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples(example: Path):
    assert read_profiles(Path(example.stem)).as_dict() == read_profiles(example).as_dict()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("like: studio", "like: air", "machine mini is like 'air', but no machine before it"),
        ("like: studio", "like: studio, draft_ms: 1", "machine mini is like studio, and has draft_ms, too"),
        ("draft_ms: 3", "times: 3", "machine studio has times, which goes with like"),
        ("kinds: {full", "each_layer: {rows_ms: {1: 1}}\n    kinds: {full", "needs each_layer, or kinds"),
        (
            "sliding: {rows_ms: {1: 2}}",
            "dense: {rows_ms: {1: 2}}",
            "studio has no costs of layers of kind 'slid",
        ),
        ("name: mini", "name: studio", "two machines are named 'studio'"),
        ("to: mini", "to: air", "'air', but there is no such machine"),
        ("free_gb: 40", "free_gb: -1", "machines.0.free_gb: input should be greater than or equal to 0"),
        ("free_gb: 40", "fre_gb: 40", "machines.0.free_gb: field required"),
        ("free_gb: 40", "free_gb: 40\n    fre_gb: 1", "machines.0.fre_gb: there is no such key"),
        ("model:", "[", "machines.yaml"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, old: str, new: str, sentence: str):
    file = _written(tmp_path, _TEXT.replace(old, new, 1))
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_profiles(file)
    assert str(caught.value).startswith(f"profiles {file}: ")
    assert "\n" not in str(caught.value)


def test_no_file_and_no_mapping(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profiles(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="a description has keys"):
        read_profiles(_written(tmp_path, "- 1"))
