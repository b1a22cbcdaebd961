"""Measures this machine for one model: seconds of layers of each kind, of embedding and head, of a step; what is free.

The model need not be here: its configuration and the shapes of its tensors suffice, and its numbers are made up
(``models.made_up``). A few layers are timed (``machine.spans``), within some seconds: the more rows a step has the
longer it takes, and what would take too long is left to a line through the others.

What is not measured: how many command buffers a device holds (MLX's own number is taken), and what it does after having
been idle, which ``Device.stay_awake`` prevents.
"""

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from splitinfer.core.kv.format import format_of
from splitinfer.engine.profiling.question import Question
from splitinfer.engine.profiling.trial import HELD_STEPS, Trial
from splitinfer.engine.versions import device_name, own_versions
from splitinfer.errors import CannotFit
from splitinfer.machine.device_queue import MAX_BUFFERS, DeviceTraits
from splitinfer.machine.profile import MachineProfile, ModelProfile
from splitinfer.machine.selection import emulated_machine
from splitinfer.machine.spans import Chosen, Fitted, Span, Timed, Timings, choose, fit
from splitinfer.models.layer_kinds import DescribedModel, describe
from splitinfer.models.loader import in_bunches, resolve_dtype
from splitinfer.models.made_up import made_up
from splitinfer.models.memory import free_bytes, on_gpu, size, unloaded_bytes

SECONDS = 12.0  # for all steps that are timed
_SINGLE = (1, 2, 4, 8, 16, 32)  # rows of as many sequences
_CHUNKS = (128, 512)  # rows of one sequence
_REPEATS, _FEWEST = 5, 2  # of a step that takes little, and of one that takes less than the next
_LONG = 0.25  # seconds of a step that is not repeated
_CONTEXT_SHARE = 0.4  # of a span's seconds, for steps with much context
_SEQUENCES = (8, 4, 2, 1)  # that get much context: as many as there is time for
_MOST_CHUNKS = 4  # of context
_TOGETHER = 64 * 2**20  # bytes of weights made at a time
_ROOM = 0.5  # of the free memory, for weights

Report = Callable[[int, int], None]  # steps done, and how many there may be; raises to end the measuring


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
    _check_device()
    free = unloaded_bytes()  # what a stage that is loaded holds is given up for another
    dtype = resolve_dtype(question.dtype, gpu=on_gpu())
    arrays = made_up(question.checkpoint)
    described = describe(question.checkpoint, dtype, question.name, arrays, format_of(question.kv_format))
    del arrays
    chosen = choose(described.profile, _room(described.profile, free_bytes()))
    stopwatch = _Stopwatch(described, chosen, question.checkpoint.vocab_size or 2, report, seconds)
    timings = stopwatch.time_all()
    fitted = fit(described.profile, chosen, timings)
    return _profile(name, described, fitted, stopwatch, free)


def _check_device() -> None:
    """Raises ConfigError for an emulated accelerator whose file does not say what each layer costs."""
    file = emulated_machine()
    if file is not None:
        from splitinfer.machine.files import read_machine_file  # and YAML with it, which no other stage needs

        read_machine_file(file).check_each_layer()


def _profile(
    name: str, described: DescribedModel, fitted: Fitted, stopwatch: "_Stopwatch", free: int
) -> MachineProfile:
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


class _Stopwatch:
    """Times the chosen spans, one after the other."""

    def __init__(
        self, described: DescribedModel, chosen: Chosen, vocab_size: int, report: Report, seconds: float
    ) -> None:
        self._described, self._chosen, self._vocab_size = described, chosen, vocab_size
        self._report, self._seconds, self._done = report, seconds, 0
        self._timings = Timings()
        self.buffers, self.wait, self.launches_ahead = 1.0, 0.0, False

    def time_all(self) -> Timings:
        """Time all spans."""
        spans = list(self._chosen.spans)
        left = self._seconds
        for i, span in enumerate(spans):
            began = time.monotonic()
            self._time(span, left / (len(spans) - i))
            self._give_up(span, spans[i + 1 :])
            left = max(0.0, left - (time.monotonic() - began))
        return self._timings

    def _time(self, span: Span, seconds: float) -> None:
        self._make(span)
        trial = Trial(self._described.structure, span, self._vocab_size)
        kind = next((kind for kind, single in self._chosen.singles.items() if single == span), None)
        has_context = kind is not None and self._grows(kind)
        for_rows = seconds * (1 - _CONTEXT_SHARE) if has_context else seconds
        self._timings.by_rows[span] = found = self._by_rows(trial, for_rows)
        if has_context and kind is not None:
            with_context = self._with_context(trial, found, seconds - for_rows)
            if with_context:
                self._timings.contexts[kind] = with_context
        self.launches_ahead = not trial.device.computes_at_launch
        if self.launches_ahead and span == (self._chosen.long or span):
            self.buffers = _buffers(*trial.held(), span.num_layers)
        self.wait = trial.wait()
        trial.close()

    def _grows(self, kind: str) -> bool:
        """Whether layers of a kind attend to more with every token."""
        return any(layer.kv_per_token > 0 for layer in self._described.profile.layers if layer.kind == kind)

    def _by_rows(self, trial: Trial, seconds: float) -> dict[int, Timed]:
        """Steps by rows, more and more, as long as there is time; of one row in any case."""
        found = dict[int, Timed]()
        gives_up, last, took = time.monotonic() + seconds, 1, 0.0
        for rows in (*_SINGLE, *_CHUNKS):
            if found and time.monotonic() + 2 * took * rows / last > gives_up:
                break
            found[rows] = self._rows(trial, rows)
            last, took = rows, found[rows][1]
        return found

    def _rows(self, trial: Trial, rows: int) -> Timed:
        """The median of steps of so many rows, without the first."""
        is_chunk = rows not in _SINGLE
        sequences = trial.open(1 if is_chunk else rows)
        timed, void = [self._step(trial, sequences, rows if is_chunk else 1)], [trial.is_void]
        while len(timed) < _count(timed[-1][1]):
            sequences = trial.open(1) if is_chunk else sequences
            timed.append(self._step(trial, sequences, rows if is_chunk else 1))
            void.append(trial.is_void)
        trial.close()
        valid = [one for one, is_void in zip(timed[1:], void[1:], strict=True) if not is_void]
        counted = sorted(valid or timed[1:] or timed, key=lambda each: each[1])
        return counted[len(counted) // 2]

    def _with_context(self, trial: Trial, little: dict[int, Timed], seconds: float) -> list[Timed]:
        """Chunks further and further behind others, and single rows behind them: as many as there is time for."""
        chunks = [rows for rows in little if rows not in _SINGLE]
        if not chunks:
            return []
        rows, each = chunks[-1], little[chunks[-1]][1]
        count = next((n for n in _SEQUENCES if n in little and n * each <= seconds), 1)
        num_chunks = max(2, min(_MOST_CHUNKS, int(seconds / max(count * each, 1e-9))))
        sequences, found = trial.open(count), list[Timed]()
        for i, sequence in enumerate(sequences):
            for number in range(num_chunks):
                timed = self._step(trial, [sequence], rows)
                if i == 0 and number:
                    found.append(timed)
        singles = [self._step(trial, sequences, 1) for _ in range(_REPEATS + 1)][1:]
        found.append(sorted(singles, key=lambda one: one[1])[len(singles) // 2])
        trial.close()
        return found

    def _step(self, trial: Trial, sequences: list[int], rows: int) -> Timed:
        self._done += 1
        self._report(self._done, max(self._done, self._expected))
        return trial.step(sequences, rows)

    @property
    def _expected(self) -> int:
        """Steps that there may be."""
        return len(self._chosen.spans) * (len(_SINGLE) + len(_CHUNKS)) * (_REPEATS + 1)

    def _make(self, span: Span) -> None:
        """Make the weights of a span's layers, a few at a time."""
        layers = self._described.structure.layers[span.start : span.end]
        for few in in_bunches(_parameters(layers), _TOGETHER):
            mx.eval(few)
            self._report(self._done, max(self._done, self._expected))

    def _give_up(self, span: Span, still: Iterable[Span]) -> None:
        """Let go of the weights that no other span needs."""
        needed = {layer for other in still for layer in range(other.start, other.end)}
        for number in set(range(span.start, span.end)) - needed:
            layer = self._described.structure.layers[number]
            layer.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), layer.parameters()))
        mx.clear_cache()


def _parameters(layers: Iterable[object]) -> list[mx.array]:
    return [array for layer in layers for _, array in tree_flatten(layer.parameters())]  # type: ignore[attr-defined]


def _count(seconds: float) -> int:
    """How often a step is timed, the first time included, that takes so long."""
    return 1 if seconds > _LONG else 1 + (_FEWEST if seconds > _LONG / _REPEATS else _REPEATS)


def _buffers(held: float, total: float, num_layers: int) -> float:
    """The command buffers of a step for each layer, from how long launches of several steps were held: until all but
    ``MAX_BUFFERS`` were complete."""
    share_left = 1 - held / total if total > 0 else 1.0
    return MAX_BUFFERS / max(share_left, 0.01) / (HELD_STEPS * num_layers)
