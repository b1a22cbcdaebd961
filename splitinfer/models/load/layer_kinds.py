"""Finds which layers of a model are alike, and what each kind holds, from the model's own modules and graphs.

Two layers are of one *kind* if their modules agree in classes, shapes and switches, and their caches are of the same
kind. Then they run the same code at the same cost, so a stage can be tried with a few of its layers
(``with_each_kind``). Integer attributes are left out, because most say where a layer is. Nothing is computed: shapes
and graphs come from placeholders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from splitinfer.core.kv.format import KVFormat
from splitinfer.errors import ModelError
from splitinfer.machine.profile import LayerProfile, ModelProfile
from splitinfer.models.caches.attention import STEP_ROWS, Attention, backend, from_config, score_bytes
from splitinfer.models.caches.caches import fresh_caches, kind_of
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.divided import divide
from splitinfer.models.cut.pretended import PretendedRank, alone
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.drafters.mtp import tensors_of
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.graph import arrays_read, uncompiled
from splitinfer.models.library.layers import children_watched, find_layers, nbytes, signature
from splitinfer.models.load.building import build_model, placeholders_of
from splitinfer.models.load.experts import expert_modules
from splitinfer.models.load.loader import check_format, kv_need
from splitinfer.models.load.tables import leave_out

_LEAST = 4  # layers of a stage that stands for a longer one: fewer cannot tell rounding from mistakes
_CONTEXT = 4096  # tokens of context for which the memory of scores is computed


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """The structure of a model built without its weights, and the profile that a plan needs.

    ``scores``: bytes that unfused attention takes in a step on this machine, per token of context.
    """

    structure: ModelStructure
    profile: ModelProfile
    scores: int


def describe(
    checkpoint: Checkpoint,
    dtype: str | None,
    name: str,
    arrays: Mapping[str, Any] | None = None,
    kv_format: KVFormat | None = None,
) -> DescribedModel:
    """Build a model and describe it. Reads no weight.

    Args:
        checkpoint: the configuration, and the names, shapes and dtypes of the tensors.
        dtype: the dtype of the numbers once loaded; ``None``: as stored.
        name: the model's name in a layout.
        arrays: the arrays to build the model from; ``None``: placeholders.
        kv_format: the format of stored keys and values; ``None``: as computed.

    Raises:
        ModelError: an architecture that mlx-lm does not know, tensors that do not fit it, or keys and values that
            cannot have the format.
        CannotCut: the model cannot be cut into layers.
    """
    model = build_model(checkpoint, placeholders_of(checkpoint) if arrays is None else arrays, dtype)
    leave_out(model, lambda: StageModel(model, 0, len(find_layers(model))).probe()[0])
    structure = ModelStructure(model)
    check_format(StageModel(model, 0, structure.num_layers, structure), kv_format)
    kinds = kinds_of(structure)
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    needs = {kind: _kv_of(structure, layer, kv_format) for kind, layer in first.items()}
    experts = {kind: _experts_of(structure, layer) for kind, layer in first.items()}
    layers = tuple(
        LayerProfile(kind, nbytes(structure.layers[i]), *needs[kind][0], 0, *experts[kind])
        for i, kind in enumerate(kinds)
    )
    attention = tuple(dict.fromkeys(each for _, found in needs.values() for each in found))
    embedding, head, is_tied = _outer_bytes(structure)
    borders = [structure.border(layer) for layer in {1, structure.num_layers // 2} if 0 < layer < structure.num_layers]
    profile = ModelProfile(
        name=name,
        layers=layers,
        embedding=embedding,
        head=head,
        is_tied=is_tied,
        hidden_row=max((border.width * border.dtype.size for border in borders), default=0),
        context_length=checkpoint.context_length,
        has_heads=bool(tensors_of(checkpoint.tensors, structure.num_layers)),
    )
    if not attention and any(layer.kv_per_token for layer in layers):  # the model computes attention itself
        attention = from_config(checkpoint.config, 2)
    scores = score_bytes(attention, backend(), STEP_ROWS, _CONTEXT) // _CONTEXT
    return DescribedModel(structure, profile, scores)


def half_of(found: DescribedModel, sums: list[int], kv_format: KVFormat | None = None) -> DescribedModel:
    """Divide a model for two ranks, and return the description of one rank's half. ``found`` is not valid afterwards.

    Call it within ``divided.alone``, which yields ``sums``, and use the half there, too.

    Raises:
        ModelError: the model cannot be divided.
    """
    structure, layers = found.structure, list[LayerProfile]()
    divide(structure.model, PretendedRank())
    of_kind = dict[str, LayerProfile]()
    for place, layer in enumerate(found.profile.layers):
        if layer.kind not in of_kind:
            stage = StageModel(structure.model, place, place + 1, structure)
            sums.clear()
            stage(mx.zeros((1, 1), mx.int32), stage.make_caches(), None, 1)
            num_sums, kv = len(sums), _kv_of(structure, place, kv_format)[0]
            of_kind[layer.kind] = LayerProfile(layer.kind, nbytes(structure.layers[place]), *kv, num_sums)
        layers.append(of_kind[layer.kind])
    embedding, head, _ = _outer_bytes(structure)
    return replace(found, profile=replace(found.profile, layers=tuple(layers), embedding=embedding, head=head))


def with_half(profile: ModelProfile, found: DescribedModel, kv_format: KVFormat | None = None) -> ModelProfile:
    """Return ``profile`` with the profile of each of two ranks in ``half``, if the model can be divided.

    Divides ``found``, so do not use it afterwards.
    """
    with alone() as sums:
        try:
            return replace(profile, half=half_of(found, sums, kv_format).profile)
        except ModelError:
            return profile


# -- kinds --------------------------------------------------------------------------------------


def kinds_of(structure: ModelStructure) -> list[str]:
    """Return the kind of each layer: "kind 1", "kind 2" ... in the order of their first layers. Every machine that
    builds the same model gets the same kinds, in any dtype."""
    layers = structure.layers
    caches = fresh_caches(structure.model)
    own = [[i for i in range(structure.num_caches) if structure.first_user(i) == layer] for layer in range(len(layers))]
    shared = [sum(layer in users for users in structure.users) for layer in range(len(layers))]
    held = [tuple(kind_of(caches[i]) for i in places) for places in own]
    signatures = [(signature(layer), held[i], shared[i]) for i, layer in enumerate(layers)]
    numbers = {signature: number for number, signature in enumerate(dict.fromkeys(signatures), 1)}
    return [f"kind {numbers[signature]}" for signature in signatures]


def with_each_kind(stage: StageModel) -> StageModel:
    """Return a stage with a few consecutive layers of this stage that include each kind. Return the stage itself if no
    fewer layers do, or if the model cannot be cut there in the same way."""
    try:
        structure = ModelStructure(stage.whole)
        kinds = kinds_of(structure)[stage.start : stage.end]
        first, last = _shortest_run(kinds, _LEAST)
        if last - first == len(kinds):
            return stage
        few = StageModel(stage.whole, stage.start + first, stage.start + last, structure)
    except ModelError:
        return stage
    return few if few.may_go_by_rows or not stage.may_go_by_rows else stage


def _shortest_run(kinds: Sequence[str], least: int) -> tuple[int, int]:
    """Return the start and end of the first shortest run of at least ``least`` layers that includes each kind."""
    lengths = range(min(least, len(kinds)), len(kinds) + 1)
    runs = ((at, at + length) for length in lengths for at in range(len(kinds) - length + 1))
    return next(run for run in runs if set(kinds[slice(*run)]) == set(kinds))


# -- bytes --------------------------------------------------------------------------------------


def _experts_of(structure: ModelStructure, layer: int) -> tuple[int, int]:
    """Return the bytes of a layer's routed experts, and of those that one token needs."""
    modules, total, chosen = dict(structure.layers[layer].named_modules()), 0, dict[str, int]()

    def watch(path: str, each: int, real: Any, args: Any, kwargs: Any) -> Any:
        chosen[path] = each * (args[1] if len(args) > 1 else kwargs["indices"]).size
        return real(*args, **kwargs)

    watches = []
    for path, _, arrays in expert_modules(structure.layers[layer]):
        size, (above, _, key) = sum(array.nbytes for array in arrays.values()), path.rpartition(".")
        each = size // next(iter(arrays.values())).shape[0]
        watches.append((modules[above], key, partial(watch, path, each)))
        total += size
    if watches:
        stage = StageModel(structure.model, layer, layer + 1, structure)
        with uncompiled(), children_watched(watches):
            stage(mx.zeros((1, 1), mx.int32), stage.make_caches(), None, 1)
    return total, sum(chosen.values())


def _kv_of(
    structure: ModelStructure, layer: int, kv_format: KVFormat | None
) -> tuple[tuple[int, int], tuple[Attention, ...]]:
    """Return the bytes of a layer's KV per token and per sequence, and its attention."""
    stage = StageModel(structure.model, layer, layer + 1, structure)
    stage.use_format(kv_format)
    if not any(structure.first_user(place) == layer for place in stage.own_places):
        return (0, 0), ()  # it attends to another layer's keys and values
    fixed, per_token, _, attention = kv_need(stage)
    return (per_token, fixed), attention


def _outer_bytes(structure: ModelStructure) -> tuple[int, int, bool]:
    """Return the bytes of the parameters read before the layers and after them, and whether some are read by both."""
    parameters = dict(tree_flatten(structure.model.parameters()))
    inside = {id(array) for layer in structure.layers for _, array in tree_flatten(layer.parameters())}
    outer = {name: array for name, array in parameters.items() if id(array) not in inside}
    last = structure.num_layers - 1
    if last == 0:
        read = _read(structure, 0, outer)
        return 0, sum(outer[name].nbytes for name in read), True
    before, behind = _read(structure, 0, outer), _read(structure, last, outer)
    return (
        sum(outer[name].nbytes for name in before),
        sum(outer[name].nbytes for name in behind),
        bool(before & behind),
    )


def _read(structure: ModelStructure, layer: int, named: Mapping[str, Any]) -> set[str]:
    outputs, _ = StageModel(structure.model, layer, layer + 1, structure).probe()
    (read,) = arrays_read(outputs, named)
    return read
