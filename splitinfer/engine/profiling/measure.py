"""Measures this machine for one model: the seconds of layers of each kind, of the head, of a step, and of the host for
a step; the free memory. Saves the profile, and answers a coordinator that asks for it.

The machine needs only the model's configuration and the shapes of its tensors; the weights are made up
(``models.load.building``). The description is a part of the frame, as JSON:

    {"files": {"config.json": "...", ...}, "tensors": {"model.norm.weight": {"dtype": "BF16", "shape": [5120]}, ...}}

A profile is saved in the user's cache folder (``profiles/DIGEST.json``). The digest covers everything that the figures
depend on, including the machine's name (home folders may be shared). The free memory is never saved.
"""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from splitinfer import cleanup
from splitinfer.common.plain_text import size
from splitinfer.common.tensor_info import ITEM_BITS
from splitinfer.core.kv.format import EXACT, format_of
from splitinfer.core.layout import DTYPES
from splitinfer.engine.profiling.load import LoadWatch
from splitinfer.engine.profiling.stopwatch import OnStep, Stopwatch
from splitinfer.engine.versions import device_name, machine_name, own_versions
from splitinfer.errors import CannotFit, ModelError, ProtocolError
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import VERSION, MachineProfile, ModelProfile
from splitinfer.machine.selection import emulated_machine
from splitinfer.models.cut.pretended import alone
from splitinfer.models.folder.checkpoint import Checkpoint, parse_entries, read_config, table_of
from splitinfer.models.load.building import made_up
from splitinfer.models.load.layer_kinds import describe, half_of
from splitinfer.models.load.loader import resolve_dtype
from splitinfer.models.memory import free_bytes, unloaded_bytes
from splitinfer.places import caches, replace_file
from splitinfer.system.disk import read_speed
from splitinfer.weights.manifest import CONFIGS
from splitinfer.wire.messages import Profile, Profiled, Progress

log = logging.getLogger(__name__)

SECONDS = 12.0  # the most seconds for whole layers
_FOR_HALVES = 0.4  # further seconds for the layers of two ranks, as a share of ``SECONDS``
_LEAST = 0.4  # the least share of ``SECONDS`` for timing steps, after describing the model
_ROOM = 0.5  # the share of free memory for weights
READS_OF_TOKEN = 1024  # about 40 layers with 8 experts of 3 tensors
_MAX_NAME = 4096  # characters of a model's name
_MOST_BYTES = 64 * 2**20  # of a description


@dataclass(frozen=True, slots=True)
class Question:
    """A model to measure, with the layout's ``dtype`` and format of keys and values."""

    name: str
    checkpoint: Checkpoint
    dtype: str = "auto"
    kv_format: str = EXACT

    def shape(self) -> str:
        """Return a digest of everything in it that a machine's profile depends on, without the weights."""
        return hashlib.sha256(described(self.checkpoint) + f"{self.dtype} {self.kv_format}".encode()).hexdigest()


def described(checkpoint: Checkpoint) -> bytes:
    """Return a checkpoint's configuration and the shapes of its tensors as JSON."""
    paths = [checkpoint.folder / name for name in CONFIGS]
    files = {path.name: path.read_text() for path in paths if path.exists()}
    tensors = {info.name: {"dtype": info.dtype, "shape": list(info.shape)} for info in checkpoint.tensors.values()}
    return json.dumps({"files": files, "tensors": tensors}, sort_keys=True).encode()


@contextmanager
def checkpoint_of(description: bytes | memoryview) -> Iterator[Checkpoint]:
    """Give the block a checkpoint from a description by ``described``, in a temporary folder without weights.

    Raises:
        ProtocolError: the description is not valid.
        ModelError: it has a dtype that MLX does not load.
    """
    if len(description) > _MOST_BYTES:
        raise ProtocolError(f"a model was described in {len(description):,} bytes; it may have {_MOST_BYTES:,}")
    try:
        found = json.loads(bytes(description))
        files = {name: str(found["files"][name]) for name in CONFIGS if name in dict(found["files"])}
        if "config.json" not in files:
            raise ValueError("it has no config.json")
        entries = {str(name): _entry(one) for name, one in found["tensors"].items()}
        tensors = table_of(parse_entries(entries, ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a model's description cannot be read ({type(error).__name__}: {error})") from error
    with cleanup.temporary_folder("splitinfer-") as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text)
        yield Checkpoint(folder, read_config(folder), tensors)


def _entry(one: dict[str, Any]) -> dict[str, Any]:
    """Return a tensor's entry in the safetensors header of a file with this tensor alone."""
    dtype, shape = str(one["dtype"]), [int(size) for size in one["shape"]]
    if dtype not in ITEM_BITS:
        raise ModelError(f"a model has tensors in {dtype!r:.20}, which MLX does not load")
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, prod(shape) * ITEM_BITS[dtype] // 8]}


def answer(command: Profile, parts: Sequence[memoryview], name: str, report: Callable[[Progress], None]) -> Profiled:
    """Return this machine's profile. ``report`` is called for each timed step, and raises to end the measuring.

    Raises:
        ProtocolError: the description of the model is missing or not valid.
        ModelError, ConfigError, DeviceFailed: as ``measure_machine``.
    """
    if len(parts) != 1 or command.dtype not in DTYPES or len(command.model) > _MAX_NAME:
        raise ProtocolError(
            f"a profile message came with {len(parts)} descriptions, the dtype {command.dtype!r:.40} and a model's "
            f"name of {len(command.model)} characters"
        )
    with checkpoint_of(parts[0]) as checkpoint:
        question = Question(command.model, checkpoint, command.dtype, command.kv_format)
        profile = profile_here(
            name, question, lambda done, total: report(Progress("measure", done, total)), again=command.again
        )
    return Profiled(json.dumps(profile.as_dict()))


def profile_here(name: str, question: Question, report: OnStep, *, again: bool = False) -> MachineProfile:
    """Return this machine's profile under ``name``, saved or measured now. ``again``: measure it in any case.

    Raises:
        ModelError, ConfigError, DeviceFailed: as ``measure_machine``.
    """
    if not again and (known := remembered(name, question)) is not None:
        return known
    profile = measure_machine(name, question, report)
    log.info("measured this machine for %s: %s", question.name, profile.trials)
    if not profile.trials.are_good:
        return profile  # not saved: the machine may be idle the next time
    try:
        replace_file(_path(question), json.dumps(profile.as_dict(), indent=1) + "\n")
    except OSError as error:
        log.info("the profile of this machine is not remembered: %s", error)
    return profile


def remembered(name: str, question: Question) -> MachineProfile | None:
    """Return this machine's saved profile under ``name``, or None if there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        path = _path(question)
        known = MachineProfile.from_dict(json.loads(path.read_text(encoding="utf-8")))
        trials = replace(known.trials, age=max(0.0, time.time() - path.stat().st_mtime))
        return replace(known, name=name, free_bytes=unloaded_bytes(), trials=trials)
    return None


def _path(question: Question) -> Path:
    file, emulated = emulated_machine(), ""
    if file is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            emulated = file.read_text(encoding="utf-8")
        emulated = emulated or str(file)
    depends_on = [VERSION, machine_name(), device_name(), emulated, repr(own_versions()), question.shape()]
    return caches() / "profiles" / f"{hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:32]}.json"


def measure_machine(
    name: str, question: Question, report: OnStep = lambda _done, _total: None, seconds: float = SECONDS
) -> MachineProfile:
    """Measure this machine in about ``seconds`` seconds, and return its profile under ``name``. Runs on the calling
    thread, and frees all memory that it used.

    Raises:
        ModelError: mlx-lm cannot build the model, it cannot be cut, or a single layer does not fit.
        ConfigError: an emulated accelerator's file cannot be read, or lacks a layer's cost.
        DeviceFailed: the device failed.
    """
    try:
        return _measured(name, question, report, seconds)
    finally:
        mx.clear_cache()


def _measured(name: str, question: Question, report: OnStep, seconds: float) -> MachineProfile:
    began, watch = time.monotonic(), LoadWatch()
    free = unloaded_bytes()  # includes the memory of a loaded stage, which another one would replace
    dtype = resolve_dtype(question.dtype)
    arrays = made_up(question.checkpoint)
    described = describe(question.checkpoint, dtype, question.name, arrays, format_of(question.kv_format))
    del arrays
    room = _room(described.profile, free_bytes())
    left = max(_LEAST * seconds, seconds - (time.monotonic() - began))
    found = Stopwatch(described, question.checkpoint.vocab_size or 2, report, left, room).measure()
    halves = _halves(question, dtype, report, _FOR_HALVES * seconds, room)
    trials = replace(found.trials, load=watch.load())
    chosen = sum(layer.chosen for layer in described.profile.layers)
    disk = (read_speed(caches(), chosen // READS_OF_TOKEN) or 0.0) if chosen else 0.0
    return replace(found, name=name, halves=halves, free_bytes=free, scores=described.scores, disk=disk, trials=trials)


def _halves(question: Question, dtype: str | None, report: OnStep, seconds: float, room: int) -> Mapping[str, Costs]:
    """Return the costs of a layer's half on one of two ranks, without sums, by the layer's kind. Return an empty
    mapping if the model cannot be divided."""
    checkpoint, kv_format = question.checkpoint, format_of(question.kv_format)
    with alone() as sums:
        try:
            whole = describe(checkpoint, dtype, question.name, made_up(checkpoint), kv_format)
            half = half_of(whole, sums, kv_format)
        except ModelError:
            return {}
        return Stopwatch(half, checkpoint.vocab_size or 2, report, seconds, room, num_ranks=2).measure().layers


def _room(model: ModelProfile, free: int) -> int:
    """Return the bytes for the layers that are timed together.

    Raises:
        CannotFit: a single layer has no room.
    """
    largest = max(layer.weights for layer in model.layers)
    outer = max(model.embedding, model.head)
    room = int(_ROOM * free) - outer - largest
    if free < outer + largest:
        raise CannotFit(
            f"this machine cannot be measured for {model.name}: a layer with the head takes {size(outer + largest)}, "
            f"and {size(free)} are free"
        )
    return max(room, largest)
