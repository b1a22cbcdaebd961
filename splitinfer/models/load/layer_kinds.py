"""Which layers of a model are alike, and what each kind of them holds: found in the model's own modules and graphs.

Two layers are of one *kind* if their modules have the same classes, shapes and switches, and caches of the same kind:
then a step costs them the same, and they run the same code, so that a stage can be tried by a few of its layers
(``with_each_kind``). Whole numbers are left out: most say where a layer is. Nothing is computed: shapes and graphs are
those of placeholders.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.core.kv.format import KVFormat
from splitinfer.errors import ModelError
from splitinfer.machine.profile import LayerProfile, ModelProfile
from splitinfer.models.caches.attention import STEP_ROWS, Attention, backend, from_config, score_bytes
from splitinfer.models.caches.caches import fresh_caches, kind_of
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.divided import PretendedRank, alone, divide
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.graph import arrays_read
from splitinfer.models.library.layers import find_layers
from splitinfer.models.load.building import build_model, placeholders_of
from splitinfer.models.load.loader import check_format, kv_need
from splitinfer.models.load.tables import leave_out

_LEAST = 4  # layers of a stage that stands for a longer one: in fewer, rounding cannot be told from mistakes
_CONTEXT = 4096  # tokens at which the memory of attention's scores is taken

Signature = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model, built from ``arrays`` that stand for its tensors, its structure, and what a plan has to know of it.

    scores: bytes of unfused attention in a step on this machine, for each token of context.
    """

    model: nn.Module
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
        checkpoint: its configuration, and the names, shapes and dtypes of its tensors.
        dtype: of its numbers as loaded; ``None``: as stored.
        name: as a layout names it.
        arrays: what the model is made of; ``None``: placeholders.
        kv_format: how keys and values are stored; ``None``: as computed.

    Raises:
        ModelError: an architecture that mlx-lm does not know, tensors that do not fit it, or keys and values that
            cannot have the format.
        CannotCut: the model cannot be cut into layers.
    """
    model = build_model(checkpoint, placeholders_of(checkpoint) if arrays is None else arrays, dtype)
    leave_out(model, lambda: StageModel(model, 0, len(find_layers(model))).probe()[0])
    check_format(StageModel(model, 0, len(find_layers(model))), kv_format)
    structure = ModelStructure(model)
    kinds = kinds_of(structure)
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    needs = {kind: _kv_of(structure, layer, kv_format) for kind, layer in first.items()}
    layers = tuple(LayerProfile(kind, _weights(structure.layers[i]), *needs[kind][0]) for i, kind in enumerate(kinds))
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
    )
    if not attention and any(layer.kv_per_token for layer in layers):  # the model computes it by itself
        attention = from_config(checkpoint.config, 2)
    scores = score_bytes(attention, backend(), STEP_ROWS, _CONTEXT) // _CONTEXT
    return DescribedModel(model, structure, profile, scores)


def half_of(found: DescribedModel, sums: list[int], kv_format: KVFormat | None = None) -> DescribedModel:
    """Return what one of two ranks has of a model, which this divides: ``found`` describes it no more. Within
    ``divided.alone``, whose list ``sums`` is, and where the half is then used.

    Raises:
        ModelError: it cannot be divided.
    """
    structure, layers = found.structure, list[LayerProfile]()
    divide(found.model, PretendedRank())
    of_kind = dict[str, LayerProfile]()
    for place, layer in enumerate(found.profile.layers):
        if layer.kind not in of_kind:
            stage = StageModel(found.model, place, place + 1, structure)
            sums.clear()
            stage(mx.zeros((1, 1), mx.int32), stage.make_caches(), None, 1)
            num_sums, kv = len(sums), _kv_of(structure, place, kv_format)[0]
            of_kind[layer.kind] = LayerProfile(layer.kind, _weights(structure.layers[place]), *kv, num_sums)
        layers.append(of_kind[layer.kind])
    embedding, head, _ = _outer_bytes(structure)
    return replace(found, profile=replace(found.profile, layers=tuple(layers), embedding=embedding, head=head))


def with_half(profile: ModelProfile, found: DescribedModel, kv_format: KVFormat | None = None) -> ModelProfile:
    """Return the profile of a described model with what each of two ranks would hold, if it can be divided.

    ``found`` is divided by this.
    """
    with alone() as sums:
        try:
            return replace(profile, half=half_of(found, sums, kv_format).profile)
        except ModelError:
            return profile


# -- kinds --------------------------------------------------------------------------------------


def kinds_of(structure: ModelStructure) -> list[str]:
    """Return the kind of each layer: "kind 1", "kind 2" ... by their first layers, so they are the same on every
    machine that builds the same model, in whatever dtype."""
    layers = structure.layers
    caches = fresh_caches(structure.model)
    own = [[i for i in range(structure.num_caches) if structure.first_user(i) == layer] for layer in range(len(layers))]
    shared = [sum(layer in users for users in structure.users) for layer in range(len(layers))]
    held = [tuple(kind_of(caches[i]) for i in places) for places in own]
    signatures = [(_shapes(layer), _switches(layer), held[i], shared[i]) for i, layer in enumerate(layers)]
    numbers = {signature: number for number, signature in enumerate(dict.fromkeys(signatures), 1)}
    return [f"kind {numbers[signature]}" for signature in signatures]


def with_each_kind(stage: StageModel) -> StageModel:
    """Return a stage of the same model, of a few of its layers that follow each other and of which each kind is one;
    the stage itself where there are no fewer, or where the model cannot be cut there in the same way."""
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
    """Return where the first of the shortest runs of at least so many begins and ends in which each kind occurs."""
    lengths = range(min(least, len(kinds)), len(kinds) + 1)
    runs = ((at, at + length) for length in lengths for at in range(len(kinds) - length + 1))
    return next(run for run in runs if set(kinds[slice(*run)]) == set(kinds))


def _shapes(layer: nn.Module) -> Signature:
    """Return the classes of a layer's modules, and the shapes of its parameters."""
    classes = tuple((path, type(module).__name__) for path, module in layer.named_modules())
    parameters = sorted((path, tuple(array.shape)) for path, array in tree_flatten(layer.parameters()))
    return (*sorted(classes), *parameters)


def _switches(layer: nn.Module) -> Signature:
    """Return the switches and words among the attributes of a layer's modules."""
    found = [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | str) and not name.startswith("_")
    ]
    return tuple(sorted(found, key=repr))


# -- bytes --------------------------------------------------------------------------------------


def _weights(layer: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(layer.parameters()))


def _kv_of(
    structure: ModelStructure, layer: int, kv_format: KVFormat | None
) -> tuple[tuple[int, int], tuple[Attention, ...]]:
    """Return the bytes of a layer's KV for each token and for each sequence, and its attention."""
    stage = StageModel(structure.model, layer, layer + 1, structure)
    stage.use_format(kv_format)
    if not any(structure.first_user(place) == layer for place in stage.own_places):
        return (0, 0), ()  # it attends to another layer's keys and values
    fixed, per_token, _, attention = kv_need(stage)
    return (per_token, fixed), attention


def _outer_bytes(structure: ModelStructure) -> tuple[int, int, bool]:
    """Return the bytes of what is read before and behind the layers, and whether both read the same."""
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
