"""With a part of the experts on disk every logit is the same to the last bit, at every size, in every form of file."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "matrix"))
import compare
import configs

from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.library import mlx_vlm
from splitinfer.models.load import loader
from splitinfer.models.load.expert_store import least_bytes, shares
from splitinfer.models.load.loader import Survey, load_stage, survey

Weights = dict[str, mx.array]
Change = Callable[[Weights], Weights]

_MANY: configs.Config = {
    "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "moe_intermediate_size": 32,
    "intermediate_size": 32, "mlp_only_layers": [], "n_group": 1,
}  # fmt: skip
TOKENS = (mx.arange(compare.NUM_PROMPT + 6) * 37 + 11)[None] % configs.VOCAB


def _configuration(name: str) -> configs.Config:
    config = {**configs.configurations()[name], **_MANY}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **_MANY}
    return config


def in_half(weights: Weights) -> Weights:
    return {name: array.astype(mx.bfloat16) if array.dtype == mx.float32 else array for name, array in weights.items()}


def apart(weights: Weights) -> Weights:
    """A tensor for each expert, as models are released."""
    found = dict[str, mx.array]()
    for name, array in weights.items():
        if ".switch_mlp." in name:
            found |= {name.replace("switch_mlp.", f"experts.{i}."): array[i] for i in range(array.shape[0])}
        else:
            found[name] = array
    return found


def as_gpt_oss(weights: Weights) -> Weights:
    """Rows of gate and up by turns, in bytes."""
    found = dict[str, mx.array]()
    for name, array in weights.items():
        if ".experts.gate_proj." in name:
            both = mx.stack([array, weights[name.replace("gate_proj", "up_proj")]], axis=2)
            name, array = name.replace("gate_proj", "gate_up_proj"), both.reshape(array.shape[0], -1, *array.shape[2:])
        elif ".experts.up_proj." in name:
            continue
        if ".experts." in name:
            name = name.replace(".weight", "_blocks").replace(".scales", "_scales").replace(".bias", "_bias")
            array = array.view(mx.uint8).reshape(*array.shape[:2], -1, 16) if name.endswith("_blocks") else array
        found[name] = array
    return found


def fused(weights: Weights) -> Weights:
    """Gate and up in one tensor, transposed."""
    found = dict(weights)
    for name in [name for name in weights if ".switch_mlp.gate_proj." in name]:
        gate, up = found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))
        layer = name.partition("switch_mlp")[0]
        found[f"{layer}experts.gate_up_proj"] = mx.contiguous(mx.concatenate([gate, up], axis=1).swapaxes(1, 2))
        down = found.pop(name.replace("gate_proj", "down_proj"))
        found[f"{layer}experts.down_proj"] = mx.contiguous(down.swapaxes(1, 2))
    return found


def save(folder: Path, name: str, mode: str = "", change: Change = dict, make: compare.Make | None = None) -> None:
    """A model whose experts are quantised in a mode, or not at all if it is empty."""
    config = _configuration(name)
    made = make or compare.mlx_lms
    if mode:
        sizes = {"group_size": 32, "bits": 4, "mode": mode}

        def quantised(config: configs.Config) -> nn.Module:
            model = made(config)
            nn.quantize(model, **sizes, class_predicate=lambda _, one: "SwitchLinear" in type(one).__name__)
            return model

        def stored(weights: Weights) -> Weights:
            own = {name.removeprefix("language_model."): array for name, array in weights.items()}
            # Any byte is an exponent, most of them far too large.
            return change({n: a % 4 + 120 if a.dtype == mx.uint8 else a for n, a in own.items()})

        compare.save(folder, {**config, "quantization": sizes}, quantised, change=stored)
        return
    compare.save(folder, config, make, change=change)


CASES: list[Any] = [
    ("qwen3_moe", "affine", dict, None),
    ("deepseek_v3", "", lambda weights: in_half(apart(weights)), "float32"),
    ("deepseek_v3", "mxfp4", dict, None),
    ("gpt_oss", "mxfp4", as_gpt_oss, None),
    ("glm4_moe", "", apart, None),
    ("qwen3_vl_moe", "", fused, None),
]
IDS = [f"{name}-{mode or 'plain'}" for name, mode, *_ in CASES]


@pytest.mark.parametrize(("name", "mode", "change", "dtype"), CASES, ids=IDS)
def test_a_part_in_memory(
    name: str, mode: str, change: Change, dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_LONG", (64, 512))
    save(tmp_path, name, mode, change)
    _check(tmp_path, dtype)


@pytest.mark.skipif(not mlx_vlm.is_installed(), reason="mlx-vlm is not installed")
def test_a_part_of_fused_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vlm_configs

    monkeypatch.setattr(loader, "_LONG", (64, 512))
    compare.save(tmp_path, {**vlm_configs.CONFIGS["hy_v4"], **_MANY}, compare.mlx_vlms)
    _check(tmp_path)


def _check(folder: Path, dtype: str | None = None) -> None:
    checkpoint = open_folder(folder)
    layers = loader.count_layers(checkpoint)
    for ends, of_all in (([layers], (0.125, 0.5)), ([layers // 2, layers], (0.25, 0.9))):
        parts = list(zip([0, *ends], ends, strict=False))
        found = [survey(checkpoint, *part, dtype) for part in parts]

        def stages(found: list[Survey], parts: Any = parts) -> list[Any]:
            return [
                load_stage(checkpoint, one, *part, dtype, lambda *_: None)
                for one, part in zip(found, parts, strict=True)
            ]

        expected = compare.run(stages(found), TOKENS, compare.CHUNK)
        for share in of_all:
            sizes = [max(least_bytes(one.experts), int(share * _total(one))) for one in found]
            some = [one.with_experts(nbytes) for one, nbytes in zip(found, sizes, strict=True)]
            on_disk = stages(some)
            assert compare.equal(compare.run(on_disk, TOKENS, compare.CHUNK), expected), (ends, share)
            for stage, one, nbytes in zip(on_disk, found, sizes, strict=True):
                counts = stage.experts.take_counts()
                assert 0 <= counts["experts_found"] < counts["experts_wanted"]
                held = shares(one.experts, nbytes)
                assert held.slots * sum(e.nbytes_each for e in one.experts) + 2 * held.area <= nbytes


def _total(found: Survey) -> int:
    assert found.experts
    return sum(one.nbytes for one in found.experts)
