"""Reads machines from files: measured by ``splitinfer bench --mode serve``, or described by hand.

A description is YAML; times are milliseconds of one stage with its layers, by the number of rows of a step:

    stages:
      - {layers: 40, rows_ms: {1: 47, 8: 52, 32: 140, 512: 2150}, buffers: 88, decode_per_1k_ms: 0.08}
      - {layers: 26, rows_ms: {1: 31, 8: 34, 32: 92, 512: 1420}, buffers: 57, prompt_per_1k_ms: 0.01}
    hop_ms: 0.3             # from one stage to the next, and back
    per_row_us: 2           # of a hop, for each row of hidden states
    host_ms: 0.5            # of the coordinator, for each step
    draft_ms: 3             # for each draft, in line with the steps of the first stage's device
    draft_more_ms: 0.1      # for each further sequence in a round of drafts, which are made together
    draft_buffers: 4        # of each draft
    launches_ahead: true    # as on a GPU; what follows is of such devices
    max_buffers: 10         # command buffers under way at a time
    wait_us: 50             # from the end of a step until who waits for it goes on
    idle_after_s: 1         # after so many idle seconds
    idle_factor: 1.5        # the next step takes so many times as long

``decode_per_1k_ms`` and ``prompt_per_1k_ms`` are for each row of an answer and of a prompt, for each thousand positions
that it attends to. ``buffers`` are the command buffers of a step (``machine.device_queue``).

With the costs of each layer instead, stages have no times, and any cut can be tried. The stages may be left out where
a layout has them:

    each_layer: {rows_ms: {1: 1.17, 8: 1.3, 512: 53}, buffers: 2.2, decode_per_1k_ms: 0.002, prompt_per_1k_ms: 0.0003}
    each_step_ms: 0.4       # of a stage, whatever layers it has
    stages: [{layers: 40}, {layers: 26}]

Costs are lines between 1, 4, 8, 16, 32, 64, 128, 256 and 512 rows, and go on behind; times given for other numbers of
rows are met where they lie on such lines.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml

from splitinfer.core.scheduler.cost_model import StageCosts
from splitinfer.errors import ConfigError
from splitinfer.machine.device_queue import MAX_BUFFERS, DeviceTraits
from splitinfer.machine.machine import Accelerator, EachLayer, Hop, Machine

NotNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=1)]
_RowsMs = Annotated[dict[Count, NotNegative], pydantic.Field(min_length=1)]
MS, US = 1e-3, 1e-6

EXAMPLES = Path(__file__).parent / "examples"


class Times(pydantic.BaseModel):
    """Milliseconds by rows and by the positions attended to."""

    model_config = pydantic.ConfigDict(extra="forbid")

    rows_ms: _RowsMs
    decode_per_1k_ms: NotNegative = 0.0
    prompt_per_1k_ms: NotNegative = 0.0

    def costs(self) -> StageCosts:
        """The costs in seconds."""
        seconds = {rows: ms * MS for rows, ms in self.rows_ms.items()}
        return StageCosts.through(seconds, self.decode_per_1k_ms * MS / 1000, self.prompt_per_1k_ms * MS / 1000)


class _Layer(Times):
    buffers: Positive = 1.0


class _Stage(Times):
    layers: int
    buffers: Count = 1


class _StageOfLayers(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    layers: int


class _Common(pydantic.BaseModel):
    """What both kinds of description have."""

    model_config = pydantic.ConfigDict(extra="forbid")

    hop_ms: NotNegative = 0.0
    per_row_us: NotNegative = 0.0
    host_ms: NotNegative = 0.0
    draft_ms: NotNegative = 0.0
    draft_more_ms: NotNegative = 0.0
    draft_buffers: Count = 1
    launches_ahead: bool = False
    max_buffers: Count = MAX_BUFFERS
    wait_us: NotNegative = 0.0
    idle_after_s: Positive = 1.0
    idle_factor: Annotated[float, pydantic.Field(ge=1, allow_inf_nan=False)] = 1.0

    def _of(
        self,
        stages: Sequence[StageCosts],
        layers: Sequence[int],
        buffers: Sequence[int],
        each_layer: EachLayer | None = None,
    ) -> Machine:
        return Machine(
            tuple(stages),
            (Hop(self.hop_ms * MS, self.per_row_us * US),) * len(stages),
            tuple(layers),
            self.host_ms * MS,
            self.draft_ms * MS,
            self.launches_ahead,
            tuple(buffers),
            DeviceTraits(self.max_buffers, self.wait_us * US, self.idle_after_s, self.idle_factor),
            self.draft_buffers,
            each_layer,
            self.draft_more_ms * MS,
        )


class _ByStage(_Common):
    stages: Annotated[list[_Stage], pydantic.Field(min_length=1)]

    def machine(self) -> Machine:
        stages = self.stages
        return self._of(
            [stage.costs() for stage in stages],
            [stage.layers for stage in stages],
            [stage.buffers for stage in stages],
        )


class _ByLayer(_Common):
    each_layer: _Layer
    each_step_ms: NotNegative = 0.0
    stages: Annotated[list[_StageOfLayers], pydantic.Field(min_length=1)] | None = None

    def machine(self, layers: Sequence[int]) -> Machine:
        """The machine of stages with these numbers of layers."""
        each = EachLayer(self.each_layer.costs(), self.each_step_ms * MS, self.each_layer.buffers)
        return self._of([each.stage(n) for n in layers], layers, [each.stage_buffers(n) for n in layers], each)


@dataclass(frozen=True, slots=True)
class MachineFile:
    """What a file says of a machine. ``path`` is named in errors."""

    path: Path
    _found: Machine | _ByLayer

    def machine(self) -> Machine:
        """The whole pipeline.

        Raises:
            ConfigError: the file gives the costs of each layer, and no stages.
        """
        if isinstance(self._found, Machine):
            return self._found
        if self._found.stages is None:
            raise ConfigError(
                f"machine {self.path} says what each layer costs, but not how many layers each stage has; add, "
                "for example, 'stages: [{layers: 40}, {layers: 26}]'"
            )
        with refusing(self.path):
            return self._found.machine([stage.layers for stage in self._found.stages])

    def check_each_layer(self) -> None:
        """Raises ConfigError if the file gives the costs of stages, and not those of each layer."""
        if isinstance(self._found, Machine):
            raise ConfigError(
                f"machine {self.path} says what whole stages cost, and to plan, what each layer costs must be known "
                "(each_layer)"
            )

    def accelerator(self, stage: int, num_stages: int, num_layers: int) -> Accelerator:
        """The device of one stage of a layout: stage ``stage`` of ``num_stages``, with ``num_layers`` layers.

        Where the file gives the costs of each layer, they are multiplied by ``num_layers``, and every layout fits.
        Where it gives those of stages, they are taken as they are, whatever layers the layout has: a small model may
        stand in for a large one.

        Raises:
            ConfigError: the file gives the costs of stages, and not of as many as the layout has.
        """
        if isinstance(self._found, _ByLayer):
            return self._found.machine([num_layers]).accelerator(0)
        if self._found.num_stages != num_stages:
            raise ConfigError(
                f"machine {self.path} has the times of {self._found.num_stages} stages, but the layout has "
                f"{num_stages}; take another machine, or one that says what each layer costs"
            )
        return self._found.accelerator(stage)


def read_machine(path: Path) -> Machine:
    """The machine in a file, which has a description, or the benchmark's JSON in its last line.

    Raises:
        ConfigError: the file cannot be read, or describes no machine.
    """
    return read_machine_file(path).machine()


def read_machine_file(path: Path) -> MachineFile:
    """What a file says of a machine: a description, or the benchmark's JSON in its last line. The name of an example
    (``machine/examples``), such as ``two-large``, stands for it where there is no file of that name.

    Raises:
        ConfigError: the file cannot be read, or describes no machine.
    """
    example = EXAMPLES / f"{path.name.removesuffix('.yaml')}.yaml"
    if len(path.parts) == 1 and not path.exists() and example.exists():
        path = example
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"machine {path} cannot be read: {error}") from error
    measured = _measured(text)
    with refusing(path):
        return MachineFile(path, _described(text) if measured is None else Machine.from_dict(measured))


@contextmanager
def refusing(path: Path, what: str = "machine") -> Iterator[None]:
    """Turns what is wrong with a description into one sentence. ``what``: of which it is one."""
    try:
        yield
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}." for part in first["loc"])[:-1]
        raise ConfigError(f"{what} {path}: {where + ': ' if where else ''}{first['msg'].lower()}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{what} {path}: {str(error).splitlines()[0]}") from error


def _measured(text: str) -> Any:
    """The benchmark's measurement, if ``text`` is its output."""
    last = text.strip().splitlines()[-1:]
    try:
        found = json.loads(last[0]) if last else None
    except ValueError:
        return None
    return found.get("machine", found) if isinstance(found, dict) and {"machine", "hops"} & set(found) else None


def _described(text: str) -> Machine | _ByLayer:
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError("a description has keys, such as stages")
    if "each_layer" not in found:
        if "each_step_ms" in found:
            raise ValueError("each_step_ms goes with each_layer; times of stages include it")
        return _ByStage.model_validate(found).machine()
    for i, stage in enumerate(found.get("stages") or ()):
        if isinstance(stage, dict) and (both := sorted(set(stage) - {"layers"})):
            raise ValueError(f"stages.{i} has {both[0]}, but with each_layer a stage has only layers")
    by_layer = _ByLayer.model_validate(found)
    by_layer.machine([1] if by_layer.stages is None else [stage.layers for stage in by_layer.stages])
    return by_layer
