"""A class without ``shard`` is halved by inspection: two halves add up to the whole model, or it is refused."""

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx.utils import tree_flatten

from splitinfer.core.halving import Kept
from splitinfer.errors import ModelError
from splitinfer.models.cut import inspection
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.divided import divide
from splitinfer.models.cut.inspection import find_unit
from splitinfer.models.cut.pretended import PretendedRank, alone, together
from splitinfer.models.library.layers import copied, find_layers

WIDTH = 16


def answers(models: list[nn.Module], groups: list[PretendedRank]) -> list[list[mx.array]]:
    """The logits of a prompt and of single tokens, by rank."""

    def run(rank: int) -> list[mx.array]:
        stage = StageModel(models[rank], 0, len(find_layers(models[rank])), checks=False)
        caches = stage.make_caches()
        return [stage((mx.arange(rows)[None] * 37 + at) % 160, caches, None, rows) for at, rows in ((0, 20), (7, 1))]

    with alone():
        return together(run, groups)


@pytest.mark.parametrize(("name", "bits"), [
    ("gemma3_text", 8), ("qwen3_next", None),
    *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("gemma3_text", None), ("qwen3_next", 8))),
])  # fmt: skip
def test_two_halves_add_up_to_the_whole_model(name: str, bits: int | None) -> None:
    """Also quantised; and each holds about half of the layers."""
    changes = {"head_dim": 32, "moe_intermediate_size": 128, "intermediate_size": 128} if bits else {}
    model, _ = tiny.build(name, num_hidden_layers=3, **changes)
    if bits:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=lambda _, one: hasattr(one, "to_quantized"))
    (whole,) = answers([model], [PretendedRank()])
    arrays = {id(array): array for _, array in tree_flatten(model.parameters())}
    groups = [PretendedRank(rank) for rank in range(2)]
    halves = [copy.deepcopy(model, dict(arrays)) for _ in groups]
    for half, group in zip(halves, groups, strict=True):
        divide(half, group)
        size, of_half = (sum(a.nbytes for _, a in tree_flatten(one.layers)) for one in (model, half))  # type: ignore[attr-defined]
        assert of_half < 0.56 * size
    first, second = answers(halves, groups)
    for one, other, wanted in zip(first, second, whole, strict=True):
        assert mx.array_equal(one, other), "a sum has the same bits on both"
        assert mx.abs(one - wanted).max() < 1e-4 * mx.abs(wanted).max()


def test_a_shard_that_leaves_nearly_all_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny.build("llama")
    monkeypatch.setattr(type(model), "shard", lambda _self, _group: None)
    whole = sum(a.nbytes for _, a in tree_flatten(model.layers))  # type: ignore[attr-defined]
    divide(model, PretendedRank())
    assert sum(a.nbytes for _, a in tree_flatten(model.layers)) < 0.56 * whole  # type: ignore[attr-defined]


def test_a_layer_that_is_run_twice_is_halved_once() -> None:
    model, _ = tiny.build("gemma3_text", num_hidden_layers=3)
    model.model.layers[1] = model.model.layers[0]
    divide(model, PretendedRank())
    assert model.model.layers[0].self_attn.n_heads == 2  # of 4


def test_a_compiled_function_in_a_layer_is_no_hindrance() -> None:
    model, _ = tiny.build("gemma3_text", num_hidden_layers=1)
    model.model.layers[0].self_attn.scaled = mx.compile(lambda x: 2 * x)
    assert copied(model).model.layers[0].self_attn.n_heads == 4


def test_a_model_of_which_too_little_can_be_halved_is_refused() -> None:
    """Three heads of keys and values: no layer's attention can be halved, and its MLP has an odd width."""
    model, _ = tiny.build(
        "gemma3_text",
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        hidden_size=48,
        intermediate_size=95,
    )
    with pytest.raises(ModelError, match=r"gemma3_text cannot be divided .* would still hold 100% .* Cut it by layers"):
        divide(model, PretendedRank())


# -- units --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Queries, keys and values from one matrix, a gate, and a part that is whole: a norm of all heads' queries."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.top_k = 4, 2
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array) -> mx.array:
        parts = mx.split(self.qkv(x), 3, axis=-1)
        heads = (part.reshape(*x.shape[:2], self.n_heads, -1).swapaxes(1, 2) for part in parts)
        out = mx.fast.scaled_dot_product_attention(*heads, scale=0.3, mask="causal")
        return self.o(out.swapaxes(1, 2).reshape(*x.shape[:2], -1) * mx.sigmoid(self.gate(x)))


class WithResidual(Attention):
    def __call__(self, x: mx.array) -> mx.array:
        return x + super().__call__(x)


class WithNorm(Attention):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(super().__call__(x), None, 1e-5)


class WithAllHeadsNorm(Attention):
    """Every head's output depends on all heads."""

    def __call__(self, x: mx.array) -> mx.array:
        values = mx.fast.rms_norm(self.qkv(x)[..., :WIDTH], None, 1e-5)
        return self.o(values * mx.sigmoid(self.gate(x)))


class FixedCount(Attention):
    """Its code does not take the number of heads from itself."""

    def __call__(self, x: mx.array) -> mx.array:
        parts = mx.split(self.qkv(x), 3, axis=-1)
        heads = (part.reshape(*x.shape[:2], 4, -1).swapaxes(1, 2) for part in parts)
        out = mx.fast.scaled_dot_product_attention(*heads, scale=0.3, mask="causal")
        return self.o(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))


def calls() -> inspection.Calls:
    return [((mx.random.normal((1, rows, WIDTH), key=mx.random.key(rows)),), {}) for rows in (12, 1)]


def found(make: Callable[[], nn.Module]) -> inspection.Unit | None:
    mx.random.seed(3)
    with alone():
        return find_unit(make(), calls())


def test_a_fused_matrix_is_halved_in_each_of_its_parts() -> None:
    unit = found(Attention)
    assert unit is not None
    kept = Kept(-2, tuple(tuple((at + half, at + half + 8) for at in (0, 16, 32)) for half in (0, 8)), 0.5)
    assert unit.rows["qkv.weight"] == kept
    assert set(unit.rows) == {"qkv.weight", "qkv.bias", "gate.weight"}
    assert (unit.columns, unit.counts) == (("o",), (("", "n_heads"),))


@pytest.mark.parametrize("make", [WithResidual, WithNorm, WithAllHeadsNorm, FixedCount])
def test_what_does_not_add_up_is_whole(make: Callable[[], nn.Module]) -> None:
    assert found(make) is None


@pytest.mark.parametrize("fault", ["rows", "columns", "counts"])
def test_the_trial_finds_a_wrong_plan(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other heads than the columns; the same columns on both ranks; no other count but the whole one."""
    if fault == "rows":
        swapped = inspection.kept_rows
        monkeypatch.setattr(inspection, "kept_rows", lambda *both: swapped(*reversed(both)))
    elif fault == "columns":
        monkeypatch.setattr(inspection, "half_of_columns", lambda count, _rank: (0, count // 2))
    else:
        monkeypatch.setattr(inspection, "counts_to_try", lambda *_: [()])
    assert found(Attention) is None


def test_a_bias_is_added_once() -> None:
    unit = found(Attention)
    assert unit is not None
    module = Attention()
    biases: list[Any] = []
    for rank in range(2):
        half = copy.deepcopy(module)
        inspection.halve(half, {"": unit}, PretendedRank(rank))
        biases.append(half.o.bias)
    assert mx.array_equal(sum(biases), module.o.bias)


class WithTable(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH)
        self.table.weight = mx.broadcast_to(mx.ones(WIDTH), (2**30, WIDTH))  # 64 GB

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x + self.table(mx.zeros(x.shape[:2], mx.int32)))


def test_a_table_takes_no_memory_and_is_whole() -> None:
    unit = found(lambda: inspection._twin(WithTable()))
    assert unit is not None
    assert "table.weight" not in unit.rows


def test_angles_of_positions_are_no_keys_of_another_layer() -> None:
    """A gradient with regard to them ends the process in MLX, where they have three sections."""
    angles, keys = mx.zeros((3, 1, 20, 4)), mx.zeros((1, 2, 20, 4))
    call = ((mx.zeros((1, 20, WIDTH)), (angles, angles)), {"shared_kv": (keys, keys)})
    assert [path for path, _ in inspection._shared(call)] == [(1, "shared_kv", 0), (1, "shared_kv", 1)]
