"""A stage surveys, reads and holds its own tensors, and no others."""

import gc
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tiny import Folder

from splitinfer.common.tensor_info import ITEM_BITS, TensorInfo, header_entry
from splitinfer.errors import CannotCut, ModelError
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.folder.checkpoint import Checkpoint, open_folder
from splitinfer.models.load import building, loader
from splitinfer.models.load.building import dtype_of
from splitinfer.models.load.loader import load_stage, resolve_dtype, survey

KINDS = [("qwen3", {}), ("qwen3_moe", {"bits": 4})]
CUTS = [(0, 1), (1, 2), (2, 4)]


def quiet(_done: int, _total: int) -> None: ...


def load(checkpoint: Checkpoint, start: int, end: int, dtype: str | None = None) -> StageModel:
    return load_stage(checkpoint, survey(checkpoint, start, end, dtype), start, end, dtype, quiet)


def run(stages: list[StageModel], tokens: mx.array) -> mx.array:
    hidden = None
    for stage in stages:
        hidden = stage(tokens, stage.make_caches(), hidden, tokens.shape[1])
    assert hidden is not None
    return hidden


def test_a_models_structure_is_read_once(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    read, reads = ModelStructure.__init__, list[object]()
    monkeypatch.setattr(ModelStructure, "__init__", lambda *given: (reads.append(given), read(*given))[-1])
    stage = load(open_folder(tiny_folder("qwen3")), 1, 3)
    assert len(reads) == 1
    assert stage.structure is None  # it would stay in memory


@pytest.mark.parametrize(("name", "changes"), KINDS)
def test_stages_share_nothing_but_a_tied_embedding_and_leave_nothing_out(name: str, changes: dict, tiny_folder: Folder):
    checkpoint = open_folder(tiny_folder(name, **changes))
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    whole = survey(checkpoint, 0, 4, None)
    found = [survey(checkpoint, start, end, None) for start, end in CUTS]
    counts = Counter(tensor for part in found for tensor in part.tensors)
    assert set(counts) == whole.tensors == set(checkpoint.tensors)
    twice = {tensor for tensor, count in counts.items() if count > 1}
    assert all("embed_tokens" in tensor for tensor in twice)
    assert bool(twice) == tied
    assert not any("embed" in tensor or "head" in tensor for tensor in found[1].tensors)
    for part in found:
        assert part.need.weights == sum(checkpoint.tensors[tensor].nbytes for tensor in part.tensors)
    first, second = checkpoint.files
    assert {checkpoint.tensors[tensor].file for tensor in found[0].tensors} == {first}
    last = survey(checkpoint, 3, 4, None).tensors
    assert tied or {checkpoint.tensors[tensor].file for tensor in last} == {second}


def test_the_need_follows_the_dtype(tiny_folder: Folder):
    checkpoint = open_folder(tiny_folder("llama"))
    weights = {dtype: survey(checkpoint, 1, 3, dtype).need for dtype in (None, "float32", "bfloat16", "float16")}
    assert weights[None] == weights["float32"]
    assert weights["bfloat16"] == weights["float16"]
    assert weights["float32"].weights == 2 * weights["float16"].weights
    assert weights["float32"].kv_per_token == 2 * weights["float16"].kv_per_token == 2 * (2 * 2 * 16 * 4)


@pytest.mark.parametrize(("start", "end"), [(0, 5), (-1, 2), (2, 2)])
def test_layers_that_are_not_there_are_refused(start: int, end: int, tiny_folder: Folder):
    with pytest.raises(CannotCut, match="in a model of 4 layers"):
        survey(open_folder(tiny_folder("llama")), start, end, None)


@pytest.mark.parametrize(("changes", "dtype"), [({"bits": 4}, None), ({}, "bfloat16")], ids=["of 4 bits", "cast"])
def test_memory_holds_the_stage_and_not_the_model(
    changes: dict, dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loader, "_TOGETHER", 2**18)
    wide = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048}
    checkpoint = open_folder(tiny.save(tmp_path / "wide", "llama", **wide, **changes))
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    for start, end in [(1, 3)] if dtype else CUTS:
        found = survey(checkpoint, start, end, dtype)
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        stage = load_stage(checkpoint, found, start, end, dtype, quiet)
        peak = mx.get_peak_memory() - before
        held = mx.get_active_memory() - before
        largest = max(checkpoint.tensors[tensor].nbytes for tensor in found.tensors)
        assert found.need.weights <= held < found.need.weights + 100_000 < total
        assert peak < found.need.weights + 2 * largest + (0 if dtype else 100_000), "the tensors as stored stayed"
        wanted = mx.float32 if dtype is None else mx.bfloat16
        assert stage(mx.array([[1]]), stage.make_caches(), None, 1).dtype == wanted
        del stage


def test_progress_rises_to_the_total(tiny_folder: Folder):
    checkpoint = open_folder(tiny_folder("llama"))
    found = survey(checkpoint, 0, 2, None)
    reports: list[tuple[int, int]] = []
    load_stage(checkpoint, found, 0, 2, None, lambda done, total: reports.append((done, total)))
    assert {total for _, total in reports} == {found.need.weights}
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert reports[-1] == (found.need.weights, found.need.weights)


def rewritten(folder: Path, target: Path, change: Callable[[dict[str, mx.array]], object]) -> Checkpoint:
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    weights: dict[str, mx.array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(mx.load(str(path)))
    change(weights)
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    return open_folder(target)


UP = "model.layers.2.mlp.up_proj.weight"
EXTRA = "model.layers.9.extra.weight"


@pytest.mark.parametrize("name", [*ITEM_BITS, "F64", "F8_E5M2"])
def test_the_dtypes_that_are_known_are_those_that_mlx_loads(name: str, tmp_path: Path):
    """A file with another one MLX refuses as a whole, so the sentence names the tensor."""
    info = TensorInfo("a", name, (2,), "model.safetensors", 0, 2 * ITEM_BITS.get(name, 64 if name == "F64" else 8) // 8)
    header = json.dumps({"a": header_entry(info, 0)}).encode()
    path = tmp_path / info.file
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(info.nbytes))
    if name in ITEM_BITS:
        assert mx.load(str(path))["a"].dtype == dtype_of(info)
        return
    with pytest.raises(RuntimeError):
        mx.load(str(path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=rf"model.safetensors holds a as {name}, which MLX does not load"):
        open_folder(tmp_path)


def test_a_file_that_mlx_cannot_read_is_a_sentence(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    checkpoint = open_folder(tiny_folder("llama"))
    found = survey(checkpoint, 0, 1, None)

    def fail(*_: object) -> None:
        raise RuntimeError("[read] Unable to read from file.")

    for where, what in ((building.mx, "load"), (loader, "_evaluate")):
        with monkeypatch.context() as patch:
            patch.setattr(where, what, fail)
            with pytest.raises(ModelError, match=r"Unable to read from file"):
                load_stage(checkpoint, found, 0, 1, None, quiet)


def test_weights_that_overflow_in_float16_are_refused(tiny_folder: Folder, tmp_path: Path):
    def change(weights: dict[str, mx.array]) -> None:
        weights[UP] = weights[UP].astype(mx.float32) * 0 - 1e6

    checkpoint = rewritten(tiny_folder("llama"), tmp_path / "wide", change)
    load(checkpoint, 2, 3, "bfloat16")
    with pytest.raises(ModelError, match=rf"{UP} overflows in float16; use dtype bfloat16 or float32"):
        load(checkpoint, 2, 3, "float16")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (UP, lambda weights: weights.pop(UP)),
        (UP, lambda weights: weights.update({UP: mx.zeros((3, 3))})),
        (EXTRA, lambda weights: weights.update({EXTRA: mx.zeros((3, 3))})),
    ],
    ids=["missing", "of another shape", "too many"],
)
def test_a_tensor_that_does_not_fit_is_named(name: str, change: Callable, tiny_folder: Folder, tmp_path: Path):
    checkpoint = rewritten(tiny_folder("llama"), tmp_path / "m", change)
    with pytest.raises(ModelError, match=rf"(?s)mlx-lm cannot build the model in .*{name}"):
        survey(checkpoint, 0, 4, None)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "no_such_model"},
        {"hidden_size": 128},
        {"num_hidden_layers": 6},
        {"num_attention_heads": "four"},
    ],
)
def test_a_configuration_that_does_not_fit_is_one_sentence(tiny_folder: Folder, tmp_path: Path, change: dict):
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match="mlx-lm cannot build the model in"):
        survey(open_folder(folder), 0, 4, None)


@pytest.mark.parametrize(
    ("name", "dtype"), [("model.norm.weight", None), (UP, "float16"), ("model.embed_tokens.weight", None)]
)
def test_weights_that_are_not_numbers_are_named(name: str, dtype: str | None, tiny_folder: Folder, tmp_path: Path):
    def break_one(tensors: dict[str, mx.array]) -> None:
        if name in tensors:
            flat = tensors[name].flatten()
            flat[flat.size // 2] = float("nan")
            tensors[name] = flat.reshape(tensors[name].shape)

    checkpoint = rewritten(tiny_folder("llama"), tmp_path / "m", break_one)
    with pytest.raises(ModelError, match=rf"{name} has values that are not numbers \(NaN\)"):
        load(checkpoint, 0, 4, dtype)


def test_a_stage_never_runs_on_placeholders(tiny_folder: Folder):
    """A survey of other layers makes an error, and no silent zeros."""
    checkpoint = open_folder(tiny_folder("llama"))
    found = survey(checkpoint, 0, 2, None)
    with pytest.raises(ModelError, match=r"the stage reads model\.\S+, which was not loaded"):
        load_stage(checkpoint, found, 0, 3, None, quiet)


@pytest.mark.parametrize(("gpu", "auto"), [(True, None), (False, "float32")])
def test_resolve_dtype(gpu: bool, auto: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "on_gpu", lambda: gpu)
    assert resolve_dtype("auto") == auto
    for dtype in ("float32", "float16", "bfloat16"):
        assert resolve_dtype(dtype) == dtype


def test_parameters_are_cast_and_quantised_weights_stay_integers(tiny_folder: Folder):
    stage = load(open_folder(tiny_folder("llama")), 0, 4, "float16")
    assert {p.dtype for _, p in tree_flatten(stage.whole.parameters())} == {mx.float16}
    stage = load(open_folder(tiny_folder("llama", bits=4)), 0, 4, "bfloat16")
    dtypes = {p.dtype for _, p in tree_flatten(stage.whole.parameters())}
    assert dtypes == {mx.uint32, mx.bfloat16}


def test_a_tied_model_with_a_head_in_its_files_is_what_mlx_lm_makes_of_it(tmp_path: Path):
    folder = tiny.save(tmp_path / "model", "llama", tie_word_embeddings=True)
    last = folder / "model-00002-of-00002.safetensors"
    arrays = mx.load(str(last))
    assert isinstance(arrays, dict)
    head = mx.ones((tiny.CONFIGS["llama"].get("vocab_size", 256), 64))
    mx.save_safetensors(str(last), {**arrays, "lm_head.weight": head})
    checkpoint, tokens = open_folder(folder), mx.array([[3, 1, 4, 1, 5]])
    cut = [load(checkpoint, 0, 3), load(checkpoint, 3, 4)]
    model, _ = load_model(folder)
    assert mx.array_equal(run(cut, tokens), model(tokens, make_prompt_cache(model)))
