"""Loads one stage: survey, fit, fetch, load.

*Survey*: the model is built with a placeholder for every tensor, cut, and called on a few tokens. MLX's graph shows
which tensors this stage reads, through all that ``sanitize`` and quantisation do to them. *Fit* compares the bytes
needed with the free bytes. *Fetch* downloads only the files that hold those tensors. *Load* builds the model again with
the real tensors and evaluates the stage's parameters a few at a time. It is an error if the stage reads a placeholder.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.common.plain_text import size
from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.kv.format import KVFormat
from splitinfer.core.kv.rewind import least_rewind
from splitinfer.core.layout import RANKS
from splitinfer.errors import CannotCut, ModelError
from splitinfer.models.caches.attention import Attention, from_config, layers_of, observed
from splitinfer.models.caches.caches import can_quantise, fresh_caches, grow_in_step, grows_evenly, rewind_limit
from splitinfer.models.caches.kv_blocks import bytes_of_block
from splitinfer.models.caches.quantised import CannotQuantise
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.divided import divide
from splitinfer.models.cut.pictures import PictureTower
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.graph import arrays_read, uncompiled
from splitinfer.models.library.layers import find_layers, type_name
from splitinfer.models.library.mlx_vlm import hash_on_host
from splitinfer.models.load.building import build_model, build_with_pictures, lazy_arrays, placeholders_of
from splitinfer.models.load.expert_store import ExpertStore, least_bytes
from splitinfer.models.load.experts import Experts, find_experts
from splitinfer.models.load.halves import Pair
from splitinfer.models.load.tables import Table, find_tables, leave_on_disk
from splitinfer.models.load.trained import is_trained, join, read_of
from splitinfer.models.memory import Need, on_gpu
from splitinfer.system.open_files import make_room

OnBytes = Callable[[int, int], None]  # bytes done, bytes in all

_OTHER_FILES = 64  # open files without weights
_TOGETHER = 32 * 2**20  # bytes of parameters read at a time: MLX itself cuts a larger one into such pieces
# Tokens of a chunk and in all, to measure the KV's growth per token over the second half of the chunks.
_LONG, _EVEN = (1024, 16384), (256, 512)


@dataclass(frozen=True, slots=True)
class Survey:
    """The tensors that a stage reads and the memory that it needs.

    Attributes:
        tensors: names of the checkpoint's tensors that the stage reads.
        rewind: how many tokens its caches can be rolled back (``core.kv.rewind``).
        head_bytes: bytes of a float32 copy of the head; ``None`` if the head cannot be computed in float32.
        attention: the attention of its layers, without repetitions.
        tables: the tables that stay on disk.
        experts: the stacked experts that may stay on disk.
        experts_bytes: the memory for experts that ``need`` includes; ``None``: for all of them.
        structure: the model's structure, so that it is read once; ``None`` if it has none.
    """

    tensors: frozenset[str]
    need: Need
    rewind: int | None
    head_bytes: int | None = 0
    attention: tuple[Attention, ...] = ()
    tables: tuple[Table, ...] = ()
    experts: tuple[Experts, ...] = ()
    experts_bytes: int | None = None
    structure: ModelStructure | None = field(default=None, repr=False, compare=False)

    def with_experts(self, nbytes: int) -> "Survey":
        """Return this survey with ``nbytes`` of memory for experts, which others than those read from disk share. If
        all experts have room, or none can stay on disk, return it unchanged.

        Raises:
            ModelError: the memory is too small.
        """
        if nbytes >= self.all_experts:
            return self
        least = least_bytes(self.experts)
        if nbytes < least:
            raise ModelError(f"experts_gb: {size(nbytes)} is too little; these layers need at least {size(least)}")
        need = replace(self.need, weights=self.need.weights - self.all_experts + nbytes)
        return replace(self, need=need, experts_bytes=nbytes)

    @property
    def all_experts(self) -> int:
        """The bytes of all experts that may stay on disk."""
        return sum(one.nbytes for one in self.experts)

    @property
    def on_disk(self) -> str:
        """A sentence that says how many experts are in memory, or an empty text if all are."""
        if self.experts_bytes is None:
            return ""
        share = f"{size(self.experts_bytes)} of {size(self.all_experts)}"
        return f"experts: {share} in memory, the others are read from disk"

    def with_float32_head(self) -> "Survey":
        """Return this survey with the memory for a float32 head: a step makes a copy of weights in half precision.

        Raises:
            ModelError: this model's head cannot be computed in float32.
        """
        if self.head_bytes is None:
            raise ModelError("this model's head cannot be computed in float32; leave float32_head out")
        return replace(self, need=replace(self.need, weights=self.need.weights + self.head_bytes))


def resolve_dtype(dtype: str) -> str | None:
    """Return the layout's dtype as a name, or ``None`` for "as stored".

    "auto" keeps the model's own dtype on a GPU. On MLX's CPU backend it means float32, because half precision is 5 to
    10 times slower there.
    """
    if dtype != "auto":
        return dtype
    return None if on_gpu() else "float32"


class _Built(NamedTuple):
    """A stage with its parameters. ``outputs``: unevaluated arrays that depend on all that it reads. ``output``: of one
    row."""

    stage: StageModel
    parameters: dict[str, mx.array]
    outputs: list[mx.array]
    output: mx.array


def _build(
    checkpoint: Checkpoint,
    arrays: dict[str, mx.array],
    layers: tuple[int, int],
    dtype: str | None,
    drafter: Checkpoint | None,
    of_drafter: Callable[[Checkpoint, StageModel], Mapping[str, mx.array]],
    group: Pair | None,
    *,
    sees: bool,
    drafter_dtype: str | None,
    structure: ModelStructure | None = None,
) -> _Built:
    """Build the model with ``arrays``, cut it, and join the stage's parts for pictures and of a drafter. Raises as
    ``survey``. ``of_drafter``: returns a drafter's arrays, unless it is in the model's own checkpoint. ``structure``:
    of this model with other values, of which the same cut was checked."""
    model, whole = build_with_pictures(checkpoint, arrays, dtype, sees=sees)
    known = None if structure is None else structure.of(model)
    stage, weights = StageModel(model, *layers, known, checks=known is None), dict[str, mx.array]()
    if drafter is not None:
        given = arrays if drafter is checkpoint else of_drafter(drafter, stage)
        weights = join(stage, drafter, given, drafter_dtype or dtype)
    if group is not None:  # only now: the structure, and a drafter's copies of layers, must not be halved
        if stage.shares_kv:
            raise CannotCut(f"{type_name(model)} cannot be divided over machines there: keys and values cross the cut")
        divide(model, group.sums)
        group.check_alike(model)
    parameters = dict(tree_flatten(model.parameters()))
    try:
        outputs, output = stage.probe()
    except (ValueError, RuntimeError) as error:  # where a model is divided: its halves do not fit together
        if group is None:
            raise
        raise CannotCut(f"{type_name(model)} cannot be divided over machines ({error})") from error
    if not stage.traceable:
        outputs = list(parameters.values())
    if whole is not None and stage.is_first:
        tower = PictureTower(whole)
        tower.join(stage)
        weights |= tower.parameters
    outputs += [*weights.values(), *([] if stage.heads is None else [stage.heads.run_nothing(stage.make_caches())])]
    return _Built(stage, parameters | weights, outputs, output)


def survey(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    dtype: str | None,
    kv_format: KVFormat | None = None,
    *,
    drafter: Checkpoint | None = None,
    drafter_dtype: str | None = None,
    sees: bool = False,
    group: Pair | None = None,
) -> Survey:
    """Return the tensors that the stage of layers [start, end) reads and the memory that it needs. Reads no weight.

    Args:
        drafter: the checkpoint of a drafter on this model's hidden states (``trained``) to include; for prediction
            heads, ``checkpoint`` itself.
        drafter_dtype: the drafter's dtype; ``None``: the same as ``dtype``.
        sees: the model takes pictures, so the first stage has a tower.
        group: the two ranks that share the layers, if they are halved.

    Raises:
        ModelError: mlx-lm does not know the architecture, tensors do not fit it, or its attention cannot read keys and
            values of ``kv_format``.
        CannotCut: this cut cannot be correct.
    """
    placeholders = placeholders_of(checkpoint)
    stage, parameters, outputs, output = _build(
        checkpoint,
        placeholders,
        (start, end),
        dtype,
        drafter,
        lambda other, _: placeholders_of(other),
        group,
        sees=sees,
        drafter_dtype=drafter_dtype,
    )
    check_format(stage, kv_format)
    tensors, read = arrays_read(outputs, placeholders, parameters)
    tables = find_tables(stage.whole, outputs, parameters, placeholders)
    read = read.difference(*(table.parameters for table in tables))
    experts = () if group else find_experts(checkpoint, stage.whole, outputs, parameters, placeholders, sees=sees)
    own = stage.make_caches().own
    kv_fixed, kv_per_token, kv_stored, attention = kv_need(stage)
    if stage.heads is not None:
        of_heads = stage.heads.bytes_per_token(stage.make_caches())
        kv_per_token += of_heads
        kv_stored += of_heads * BLOCK
    if not attention and kv_per_token:  # the model computes attention itself
        attention = from_config(checkpoint.config, output.itemsize)
    return Survey(
        tensors=frozenset(tensors),
        need=Need(sum(parameters[name].nbytes for name in read), kv_fixed, kv_per_token, kv_stored),
        rewind=least_rewind(rewind_limit(c) for c in own),
        head_bytes=_head_bytes(stage, output.shape[-1]) if stage.is_last else 0,
        attention=attention,
        tables=tables,
        experts=experts,
        structure=stage.structure,
    )


def _head_bytes(stage: StageModel, logits_size: int) -> int | None:
    """Return the bytes of a float32 copy of the head. Return 0 if the head is quantised (its products read the words)
    or in float32 already, and ``None`` if norm and head do not work on rows."""
    if not stage.taps_rows:
        return None
    tables = [
        module.weight
        for _, module in stage.whole.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.shape[0] == logits_size
    ]
    return max((4 * table.size for table in tables if table.dtype != mx.float32), default=0)


def count_layers(checkpoint: Checkpoint) -> int:
    """Return the number of layers of the whole model. Reads no weight.

    Raises:
        ModelError: the checkpoint is a drafter for another model.
    """
    if is_trained(checkpoint):
        raise ModelError(f"{checkpoint.folder} is a drafter for another model: give that model, and this with --draft")
    placeholders = placeholders_of(checkpoint)
    return len(find_layers(build_model(checkpoint, placeholders, None)))


def load_stage(
    checkpoint: Checkpoint,
    found: Survey,
    start: int,
    end: int,
    dtype: str | None,
    report: OnBytes,
    drafter: Checkpoint | None = None,
    *,
    drafter_dtype: str | None = None,
    sees: bool = False,
    group: Pair | None = None,
) -> StageModel:
    """Read the stage's own tensors, and nothing else, into memory. Return the stage. Arguments as in ``survey``.

    Raises:
        ModelError: a tensor that the stage reads was not in its survey.
    """
    make_room(len(checkpoint.paths_of(found.tensors)) + _OTHER_FILES)  # each file stays open until its tensors are read
    arrays = placeholders_of(checkpoint) | lazy_arrays(checkpoint, found.tensors)
    stage, parameters, outputs, output = _build(
        checkpoint, arrays, (start, end), dtype, drafter,
        lambda other, stage: lazy_arrays(other, read_of(other, is_last=stage.is_last)), group, sees=sees,
        drafter_dtype=drafter_dtype, structure=found.structure,
    )  # fmt: skip
    missing, read = arrays_read(outputs, {n: a for n, a in arrays.items() if n not in found.tensors}, parameters)
    if missing:
        raise ModelError(f"{checkpoint.folder}: the stage reads {sorted(missing)[0]}, which was not loaded")
    if found.tables:
        leave_on_disk(stage.whole, found.tables, read, checkpoint)
        hash_on_host(stage.whole)
        stage.reads_tokens = True
    on_disk: list[Table | Experts] = [*found.tables, *([] if found.experts_bytes is None else found.experts)]
    in_memory = sorted(read.difference(*(one.parameters for one in on_disk)))
    if found.experts_bytes is not None:
        stage.experts = ExpertStore(checkpoint, found.experts, found.experts_bytes)
        stage.experts.put_into(stage.whole)
        stage.reads_tokens = True
        parameters = {name: parameters[name] for name in in_memory}
    # Drop these references, so that a stored tensor is freed as soon as the parameters made of it are evaluated.
    del arrays, outputs, output
    stage.structure = None
    # A rank reads more of a stored tensor than it keeps.
    together = _TOGETHER if group is None else _TOGETHER // RANKS**2
    try:
        _evaluate([parameters[name] for name in in_memory], together, report)
    except RuntimeError as error:  # MLX's: a disk or a file that cannot be read
        raise ModelError(f"{checkpoint.folder}: the weights cannot be read ({error})") from error
    _check_numbers({name: parameters[name] for name in in_memory}, checkpoint, dtype)
    if stage.heads is not None:
        stage.heads.heads.check(stage)
    return stage


def _evaluate(parameters: list[mx.array], together: int, report: OnBytes) -> None:
    total, done = sum(p.nbytes for p in parameters), 0
    for few in in_bunches(parameters, together):
        mx.eval(few)
        done += sum(p.nbytes for p in few)
        report(done, total)
    mx.clear_cache()


def _check_numbers(parameters: Mapping[str, mx.array], checkpoint: Checkpoint, dtype: str | None) -> None:
    """Refuse weights that would turn every answer into noise. Reads all of them once, and weights in float16 twice.

    Raises:
        ModelError: a tensor has NaN, or overflows in float16, whose largest number is 65,504; says which.
    """
    floats = {name: a for name, a in parameters.items() if mx.issubdtype(a.dtype, mx.floating) and a.size}
    found = {name: mx.isnan(mx.max(array)) for name, array in floats.items()}
    mx.eval(found)
    for name, has_nan in found.items():
        if has_nan.item():
            raise ModelError(
                f"{checkpoint.folder}: {name} has values that are not numbers (NaN), so its file is damaged or was "
                "converted wrongly: download or convert it again"
            )
    halves = [(name, array) for name, array in floats.items() if dtype == "float16" and array.dtype == mx.float16]
    are_infinite = [mx.isinf(mx.max(array)) | mx.isinf(mx.min(array)) for _, array in halves]
    mx.eval(are_infinite)
    for (name, _), is_infinite in zip(halves, are_infinite, strict=True):
        if is_infinite.item():
            raise ModelError(f"{checkpoint.folder}: {name} overflows in float16; use dtype bfloat16 or float32")


def in_bunches(arrays: Iterable[mx.array], most: int) -> Iterator[list[mx.array]]:
    """Yield the arrays in their order, in lists of at most ``most`` bytes. A larger array gets a list of its own."""
    bunch, held = list[mx.array](), 0
    for array in arrays:
        if bunch and held + array.nbytes > most:
            yield bunch
            bunch, held = [], 0
        bunch.append(array)
        held += array.nbytes
    if bunch:
        yield bunch


def kv_need(stage: StageModel) -> tuple[int, int, int, tuple[Attention, ...]]:
    """Return the bytes of caches that do not grow (states, full sliding windows), the bytes per token of the others,
    the bytes per stored block, and the layers' attention."""
    caches, sizes = stage.make_caches(), []
    for cache in caches.own:
        grow_in_step(cache)  # at the lengths measured here, such caches have no spare room
    # Two chunks suffice if no cache fills up as a window does. A recurrent layer makes a graph node for every token.
    chunk, length = _EVEN if all(map(grows_evenly, caches.own)) else _LONG
    with uncompiled(), observed() as calls:
        for _ in range(length // chunk):
            calls.clear()  # only the last graph's calls count
            stage(mx.zeros((1, chunk), mx.int32), caches, None, 1)
            sizes.append(sum(array.nbytes for array in caches.arrays()))
    half = len(sizes) // 2
    per_token = -(-(sizes[-1] - sizes[half - 1]) // (chunk * half))
    fixed, stored = max(0, sizes[-1] - length * per_token), bytes_of_block(caches, stage.own_places, length)
    return fixed, per_token, stored, layers_of(calls, length)


def check_format(stage: StageModel, kv_format: KVFormat | None) -> None:
    """Make a stage keep keys and values in a format, if its attention can read it. Computes nothing.

    Raises:
        ModelError: the format cannot be used; says why.
    """
    if kv_format is None:
        return
    name = type_name(stage.whole)
    if not any(map(can_quantise, fresh_caches(stage.whole))):
        raise ModelError(f"{name} has no layer with plain keys and values, so they cannot be {kv_format.name}")
    stage.use_format(kv_format)
    try:
        stage.probe()
        return
    except CannotQuantise as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything when given unknown caches
        said = " ".join(str(error).split())[:200]
        reason = f"its attention does not use mlx-lm's function ({type(error).__name__}: {said})"
    raise ModelError(f"keys and values of {name} cannot be {kv_format.name}: {reason}")
