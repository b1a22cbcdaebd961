"""Layout files: finding them, and one helpful sentence for each way to get them wrong."""

import re
from pathlib import Path
from typing import Any

import pytest

from splitinfer.config import Layout, find_layout, read_layout
from splitinfer.core import layout as core
from splitinfer.errors import LayoutError

LAYOUTS = Path(__file__).parent.parent / "layouts"
STAGES = [{"name": "studio", "layers": 40}, {"name": "mini", "layers": 26, "address": "tcp://mini.local:5577"}]


def beside(stage: Any) -> dict[str, Any]:
    return {"stages": [STAGES[0], stage]}


def error_of_text(folder: Path, text: str | bytes, name: str = "x.yaml") -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LayoutError) as caught:
        read_layout(path)
    return str(caught.value)


# ----- reading ----------------------------------------------------------------------------------------


def test_from_dict():
    layout = Layout.from_dict({"model": "m", "draft": "ngram", "dtype": "float32", "stages": STAGES})
    assert isinstance(layout, core.Layout)
    assert (layout.model, layout.draft, layout.dtype, layout.name) == ("m", "ngram", "float32", "(unnamed)")
    assert layout.stages == core.lay_out([("studio", 40, None), ("mini", 26, "tcp://mini.local:5577")])


@pytest.mark.parametrize(
    ("name", "counts"), [("40-26", [40, 26]), ("53-13", [53, 13]), ("40-13-13", [40, 13, 13]), ("demo", [6, 6])]
)
def test_the_layouts_that_come_with_it(name: str, counts: list[int]):
    layout = find_layout(name)
    assert [stage.num_layers for stage in layout.stages] == counts
    assert (layout.model, layout.draft) == (("demo", "demo-draft") if name == "demo" else (None, None))


# ----- finding ----------------------------------------------------------------------------------------


def one_stage(layers: int) -> str:
    return f"stages: [{{name: all, layers: {layers}}}]"


def test_a_file_comes_before_a_name_and_here_before_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert find_layout("demo").num_layers == 12
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "demo.yaml").write_text(one_stage(3))
    assert find_layout("demo").num_layers == 3
    (tmp_path / "demo.yaml").write_text(one_stage(4))
    assert find_layout("demo").num_layers == find_layout("demo.yaml").num_layers == 4
    assert find_layout("layouts/demo").num_layers == find_layout("./layouts/demo.yaml").num_layers == 3
    assert find_layout(str(tmp_path / "demo.yaml")).num_layers == 4


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "mine.yaml").write_text(one_stage(3))
    with pytest.raises(LayoutError) as caught:
        find_layout("dmo")
    assert str(caught.value) == (
        "there is no layout 'dmo', neither as a file nor by name; known by name: 40-13-13, 40-26, 53-13, demo, mine"
    )


@pytest.mark.parametrize("path", ["folder/demo.yaml", "../nowhere/demo", ""])
def test_a_path_is_only_a_path(path: str):
    with pytest.raises(LayoutError, match=f"there is no layout file '{re.escape(path)}'"):
        find_layout(path)


def test_an_unreadable_file(tmp_path: Path):
    with pytest.raises(LayoutError, match=r"layout .*gone.yaml cannot be read: No such file or directory"):
        read_layout(tmp_path / "gone.yaml")
    assert "is not UTF-8 text (byte 2)" in error_of_text(tmp_path, b"a:\xff")


# ----- refusing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "layout x.yaml is empty; it needs at least the key 'stages'"),
        ("- 1", "layout x.yaml must be a mapping with the key 'stages', but is a list"),
        ("stages:\n  - {name: a layers: 3}", "layout x.yaml, line 2: this cannot be read: keys of one level"),
        ("stages:\n  - name: a\n   layers: 3", "layout x.yaml, line 3: this cannot be read: keys of one level"),
        ("model: a\ndraft: b\nmodel: c", "layout x.yaml, line 3: the key 'model' is written twice"),
        ("model: !!python/name:os.system", "layout x.yaml, line 1: could not determine a constructor"),
        ("model: 2026-13-01", "layout x.yaml is not YAML: month must be in 1..12"),
        ("model: \x01", "layout x.yaml is not YAML: unacceptable character"),
    ],
)
def test_what_is_not_a_layout_file(tmp_path: Path, text: str, message: str):
    assert error_of_text(tmp_path, text).startswith(message)


KEYS = "stages, model, draft, dtype, serving, kv_format, float32_head"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"stages": STAGES, "modl": "m"}, "unknown key 'modl' in layout x.yaml; did you mean 'model'?"),
        ({"stages": STAGES, 7: 1}, f"unknown key 7 in layout x.yaml; known keys: {KEYS}"),
        ({}, "layout x.yaml lacks the key 'stages'"),
        ({"stages": {"a": 1}}, "'stages' in layout x.yaml must be a list of stages, but is a mapping"),
        ({"stages": STAGES, "model": 7}, "'model' in layout x.yaml must be text, but is 7"),
        ({"stages": STAGES, "draft": ""}, "'draft' in layout x.yaml must be text of at least one character, but is ''"),
        (beside({"name": "b", "layrs": 2}), "unknown key 'layrs' in stage 2 of layout x.yaml; did you mean 'layers'?"),
        (beside({"name": "b"}), "stage 2 of layout x.yaml lacks the key 'layers'"),
        (beside({"name": "b", "layers": 2.0}),
         "'layers' in stage 2 of layout x.yaml must be a whole number, but is 2.0"),
        (beside("mini"), "stage 2 of layout x.yaml must be a mapping with the keys name, layers and (for a worker) "
         "address and key, but is 'mini'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_layout(mapping: Any, message: str):
    with pytest.raises(LayoutError) as caught:
        Layout.from_dict(mapping, "x.yaml")
    assert str(caught.value) == message


# ----- the page about it ------------------------------------------------------------------------------


TWO = "stages: [{name: studio, layers: 40}, {name: mini, layers: 26, address: mini.local}]"
AIR = ", {name: air, layers: 1, address: mini.local}]"
WRONG = {  # a layout for each sentence of the page
    "unknown key": TWO.replace("26", "26, layrs: 1"),
    "must be a whole number": TWO.replace("26", "twenty"),
    "are both at": TWO.replace("]", AIR),
    "is written twice": f"model: demo\n{TWO}\n{TWO}",
}


def test_the_readme_shows_true_examples_and_true_errors(tmp_path: Path):
    """Its yaml blocks are layouts, and each line of its text block is what is said of a wrong one."""
    text = (LAYOUTS / "README.md").read_text()
    for layout in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        (tmp_path / "good.yaml").write_text(layout)
        read_layout(tmp_path / "good.yaml")
    (errors,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    *sentences, of_a_model = errors.splitlines()
    for sentence in sentences:
        (wrong,) = (layout for words, layout in WRONG.items() if words in sentence)
        assert error_of_text(tmp_path, wrong, "my.yaml") == sentence
    with pytest.raises(LayoutError, match=re.escape(of_a_model)):
        find_layout("40-26").check(48)
