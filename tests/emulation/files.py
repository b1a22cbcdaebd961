"""Reads machines from files: described by hand (YAML), or as plain numbers (``Machine.as_dict``, JSON).

A *machine* is a whole pipeline. Times are milliseconds of one stage with its layers, by the number of rows of a step,
or with ``each_layer`` those of one layer; then every cut fits, and the stages may be left out where a layout has them.

    stages                      required, but with each_layer: of each stage ``layers`` and ``rows_ms``; perhaps
                                ``decode_per_1k_ms`` and ``prompt_per_1k_ms``, for each row of an answer and of a
                                prompt, for each thousand positions that it attends to; and ``buffers``, the command
                                buffers of a step (MLX on Metal makes about two for a layer)
    each_layer, each_step_ms    the costs of one layer, and of a step whatever layers there are
    hop_ms, per_row_us          from one stage to the next, and back: for each step, and for each row of hidden states
    host_ms                     of the coordinator, for each step
    draft_ms, draft_buffers     of each draft; on devices that launch ahead it queues behind the first stage's steps
    draft_more_ms               for each further sequence in a round of drafts, which are made together
    sum_us                      by rows, of a sum of two ranks that have a stage together
    launches_ahead              whether devices compute while their hosts go on, as GPUs do; the keys below are of such
    max_buffers                 command buffers in flight at a time: a launch holds its thread until no more are left
    wait_us                     from the end of a step until its waiter continues
    idle_after_s, idle_factor   after this many idle seconds the next step takes this many times as long
    rounds_like                 a chip, such as "M4 Max": products round as its kernels do (``rounding.py``)
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import AfterValidator, Field

from splitinfer.errors import ConfigError
from splitinfer.machine.costs import Costs, Count, NotNegative, sentence
from tests.emulation.device_queue import MAX_BUFFERS, DeviceTraits, Positive
from tests.emulation.machine import EachLayer, Hop, Machine

EXAMPLES = Path(__file__).parent / "machines"


def read_machine(path: Path) -> Machine:
    """The machine in a file. The name of an example, such as ``two-large``, stands for it where there is no file of
    that name.

    Raises:
        ConfigError: the file cannot be read, describes no machine, or gives the costs of each layer, and no stages.
    """
    path, found, has_stages = _read(path)
    if not has_stages:
        raise ConfigError(
            f"machine {path} says what each layer costs, but not how many layers each stage has; add, "
            "for example, 'stages: [{layers: 40}, {layers: 26}]'"
        )
    return found


def read_devices(path: Path, layers: Sequence[int]) -> list[Machine]:
    """The device of each stage of a layout with these numbers of layers, as a machine of its own.

    Where the file gives the costs of each layer, they are multiplied, and every layout fits. Where it gives those of
    stages, they are taken as they are, whatever layers the layout has: a small model may stand in for a large one.

    Raises:
        ConfigError: as ``read_machine``, or the file gives the costs of stages, and not of as many as the layout has.
    """
    path, found, _ = _read(path)
    if found.each_layer is not None:
        return [found.alone(0, count) for count in layers]
    if found.num_stages != len(layers):
        raise ConfigError(
            f"machine {path} has the times of {found.num_stages} stages, but the layout has {len(layers)}; take "
            "another machine, or one that says what each layer costs"
        )
    return [found.alone(stage, count) for stage, count in enumerate(found.layers)]


def _read(path: Path) -> tuple[Path, Machine, bool]:
    """A machine, where it was found, and whether the file says how many layers each stage has; if not, the machine has
    one stage of one layer."""
    example = EXAMPLES / f"{path.name.removesuffix('.yaml')}.yaml"
    if len(path.parts) == 1 and not path.exists() and example.exists():
        path = example
    try:
        return path, *_machine(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"machine {path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"machine {path}: {sentence(error)}") from error


def _machine(text: str) -> tuple[Machine, bool]:
    try:
        found = json.loads(text)  # far quicker than YAML, of which it is a part
    except ValueError:
        found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError("a description has keys, such as stages")
    if "hops" in found:
        return Machine.from_dict(found), True
    described = (_ByLayer if "each_layer" in found else _ByStage).model_validate(found)
    return described.machine(), described.stages is not None


# -- descriptions: a key names its unit; the field behind it is named and measured as in what it becomes ---------------

_Ms = Annotated[NotNegative, AfterValidator(lambda found: found * 1e-3)]
_Us = Annotated[NotNegative, AfterValidator(lambda found: found * 1e-6)]


class _Described(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    def values(self, *names: str) -> dict[str, Any]:
        """Some fields by their names."""
        return {name: getattr(self, name) for name in names}


class _Times(_Described):
    """Seconds by rows, and for each position attended to."""

    rows: Annotated[dict[Count, _Ms], Field(alias="rows_ms", min_length=1)]
    decode: _Us = Field(0.0, alias="decode_per_1k_ms")
    prompt: _Us = Field(0.0, alias="prompt_per_1k_ms")

    def costs(self) -> Costs:
        return Costs.through(self.rows, self.decode, self.prompt)


class _TimedStage(_Times):
    layers: Count
    buffers: Count = 1


class _Pipeline(_Described):
    hop: _Ms = Field(0.0, alias="hop_ms")
    per_row: _Us = Field(0.0, alias="per_row_us")
    host: _Ms = Field(0.0, alias="host_ms")
    draft: _Ms = Field(0.0, alias="draft_ms")
    draft_more: _Ms = Field(0.0, alias="draft_more_ms")
    draft_buffers: Count = 1
    sum: Annotated[dict[Count, _Us], Field(alias="sum_us")] = Field(default_factory=dict)
    launches_ahead: bool = False
    max_buffers: Count = MAX_BUFFERS
    wait: _Us = Field(0.0, alias="wait_us")
    idle_after: Positive = Field(1.0, alias="idle_after_s")
    idle_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    rounds_like: str = ""

    def _of(self, layers: list[int], devices: list[tuple[Costs, int]], each: EachLayer | None) -> Machine:
        return Machine(
            stages=tuple(costs for costs, _ in devices),
            hops=(Hop(self.hop, self.per_row),) * len(layers),
            layers=tuple(layers),
            buffers=tuple(count for _, count in devices),
            each_layer=each,
            sum=Costs.through(self.sum),
            device=DeviceTraits(**self.values("max_buffers", "wait", "idle_after", "idle_factor", "rounds_like")),
            **self.values("host", "draft", "draft_more", "draft_buffers", "launches_ahead"),
        )


class _ByStage(_Pipeline):
    stages: Annotated[list[_TimedStage], Field(min_length=1)]

    def machine(self) -> Machine:
        devices = [(stage.costs(), stage.buffers) for stage in self.stages]
        return self._of([stage.layers for stage in self.stages], devices, None)


class _Layer(_Times):
    buffers: Positive = 1.0


class _Stage(_Described):
    layers: Count


class _ByLayer(_Pipeline):
    each_layer: _Layer
    step: _Ms = Field(0.0, alias="each_step_ms")
    stages: Annotated[list[_Stage], Field(min_length=1)] | None = None

    def machine(self) -> Machine:
        """The machine; of one stage with one layer if the description has no stages."""
        each = EachLayer(self.each_layer.costs(), self.step, self.each_layer.buffers)
        layers = [stage.layers for stage in self.stages or [_Stage(layers=1)]]
        return self._of(layers, [(each.stage(count), each.stage_buffers(count)) for count in layers], each)
