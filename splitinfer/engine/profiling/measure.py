"""Measures this machine for one model: seconds of layers of each kind, of embedding and head, of a step; what is free.

The model need not be here: its configuration and the shapes of its tensors suffice, and its numbers are made up
(``models.made_up``). A few layers are timed (``machine.spans``), within some seconds, the most important steps first
(``machine.timetable``); what would take too long is left to a line through the others.

What is not measured: how many command buffers a device holds (MLX's own number is taken), and what it does after having
been idle, which ``Device.stay_awake`` prevents.
"""

import time
from datetime import UTC, datetime

import mlx.core as mx

from splitinfer.core.kv.format import format_of
from splitinfer.engine.profiling.question import Question
from splitinfer.engine.profiling.stopwatch import Report, Stopwatch
from splitinfer.engine.versions import device_name, own_versions
from splitinfer.errors import CannotFit
from splitinfer.machine.device_queue import DeviceTraits
from splitinfer.machine.profile import MachineProfile, ModelProfile
from splitinfer.machine.selection import emulated_machine
from splitinfer.machine.spans import Fitted, choose, fit
from splitinfer.models.layer_kinds import DescribedModel, describe
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.made_up import made_up
from splitinfer.models.memory import free_bytes, on_gpu, size, unloaded_bytes

SECONDS = 12.0  # for all of it
_LEAST = 0.4  # of them, for the steps that are timed, however long it took to describe the model
_ROOM = 0.5  # of the free memory, for weights


def measure_machine(
    name: str, question: Question, report: Report = lambda _done, _total: None, seconds: float = SECONDS
) -> MachineProfile:
    """Measure this machine, which is called ``name``, in about ``seconds`` seconds. One thread, which then may use MLX
    as before; what it held for this is freed.

    Raises:
        ModelError: mlx-lm cannot build the model, it cannot be cut, or not even a layer fits.
        ConfigError: an emulated accelerator's file does not say what each layer costs.
        DeviceFailed: the device did.
    """
    try:
        return _measured(name, question, report, seconds)
    finally:
        mx.clear_cache()


def _measured(name: str, question: Question, report: Report, seconds: float) -> MachineProfile:
    began = time.monotonic()
    _check_device()
    free = unloaded_bytes()  # what a stage that is loaded holds is given up for another
    dtype = resolve_dtype(question.dtype, gpu=on_gpu())
    arrays = made_up(question.checkpoint)
    described = describe(question.checkpoint, dtype, question.name, arrays, format_of(question.kv_format))
    del arrays
    chosen = choose(described.profile, _room(described.profile, free_bytes()))
    left = max(_LEAST * seconds, seconds - (time.monotonic() - began))
    stopwatch = Stopwatch(described, chosen, question.checkpoint.vocab_size or 2, report, left)
    timings = stopwatch.time_all()
    fitted = fit(described.profile, chosen, timings)
    return _profile(name, described, fitted, stopwatch, free)


def _check_device() -> None:
    """Raises ConfigError for an emulated accelerator whose file does not say what each layer costs."""
    file = emulated_machine()
    if file is not None:
        from splitinfer.machine.files import read_machine_file  # and YAML with it, which no other stage needs

        read_machine_file(file).check_each_layer()


def _profile(name: str, described: DescribedModel, fitted: Fitted, stopwatch: Stopwatch, free: int) -> MachineProfile:
    versions = own_versions()
    return MachineProfile(
        name=name,
        layers=fitted.layers,
        step=fitted.step,
        embedding=fitted.embedding,
        head=fitted.head,
        free_bytes=free,
        scores=described.scores,
        buffers=stopwatch.buffers,
        launches_ahead=stopwatch.launches_ahead,
        device=DeviceTraits(wait=stopwatch.wait if stopwatch.launches_ahead else 0.0),
        device_name=device_name(),
        versions=f"splitinfer {versions.splitinfer}, mlx {versions.mlx}, mlx-lm {versions.mlx_lm}",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _room(model: ModelProfile, free: int) -> int:
    """Bytes for the layers that are timed together.

    Raises:
        CannotFit: there is none for a single one.
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
