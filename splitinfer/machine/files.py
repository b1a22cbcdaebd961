"""Reads machines and profiles from files: as they were measured (JSON), or described by hand (YAML).

A *machine* is a whole pipeline; docs/fast/serving.md lists its keys. Times are milliseconds of one stage with its
layers, by the number of rows of a step. With ``each_layer`` they are those of one layer; then any cut can be tried, and
the stages may be left out where a layout has them.

*Profiles* are of a model, of machines that may run it, the coordinator first, and of their links. Times are those of
one layer, under the same names; bytes are GB of 10^9 where a name says so:

    model:
      name: some/model-4bit                 # as a layout names it
      layers: [{count: 66, weights_gb: 0.55, kv_bytes_per_token: 4096}]
      embedding_gb: 0.7
      head_gb: 0.7                          # tied: true where both are the same weights
      hidden_bytes: 16384                   # of one row of hidden states on a link
      context_length: 131072
      draft: {name: some/small-4bit, weights_gb: 0.6, kv_bytes_per_token: 10000}
    machines:
      - name: studio
        free_gb: 40
        each_layer: {rows_ms: {1: 1.17, 8: 1.3, 32: 3.5, 512: 53.8}, decode_per_1k_ms: 0.002}
        each_step_ms: 0.2
        buffers: 2.2                        # command buffers of a step, for each layer
        head: {rows_ms: {1: 1.2, 64: 6}}
      - {name: mini, address: "tcp://mini.local:5577", like: studio, times: 2, free_gb: 20}
    links:
      - {from: studio, to: mini, latency_ms: 0.3, mb_per_second: 1000}

``like`` takes all costs of a machine before it, and ``times`` multiplies them: half as fast. Where layers are of
several kinds, each entry of the model's ``layers`` has a ``kind``, and a machine has ``kinds``, the times of each, in
place of ``each_layer``; ``repeat`` of the model repeats its layers. A link serves both ways unless the way back is
written, too.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import yaml

from splitinfer.core.costs.stage import StageCosts
from splitinfer.errors import ConfigError
from splitinfer.machine.device_queue import MAX_BUFFERS, DeviceTraits
from splitinfer.machine.machine import Accelerator, EachLayer, Hop, Machine
from splitinfer.machine.numbers import Bytes, Count, NotNegative, Positive, sentence
from splitinfer.machine.profile import DraftProfile, LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles

EXAMPLES = Path(__file__).parent / "examples"
_MS, _US, _MB, _GB = 1e-3, 1e-6, 1e6, 1e9
T = TypeVar("T")
_ALL = "layer"  # the kind of layers that are all alike


@dataclass(frozen=True, slots=True)
class MachineFile:
    """A machine from a file. ``has_stages``: whether the file says how many layers each stage has; if not, the machine
    has one stage of one layer."""

    path: Path
    found: Machine
    has_stages: bool = True

    def machine(self) -> Machine:
        """The whole pipeline.

        Raises:
            ConfigError: the file gives the costs of each layer, and no stages.
        """
        if not self.has_stages:
            raise ConfigError(
                f"machine {self.path} says what each layer costs, but not how many layers each stage has; add, "
                "for example, 'stages: [{layers: 40}, {layers: 26}]'"
            )
        return self.found

    def check_each_layer(self) -> None:
        """Raises ConfigError if the file gives the costs of stages, and not those of each layer."""
        if self.found.each_layer is None:
            raise ConfigError(
                f"machine {self.path} gives the times of whole stages; to plan, it must give those of each layer "
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
        if self.found.each_layer is not None:
            return self.found.with_layers(0, num_layers)
        if self.found.num_stages != num_stages:
            raise ConfigError(
                f"machine {self.path} has the times of {self.found.num_stages} stages, but the layout has "
                f"{num_stages}; take another machine, or one that says what each layer costs"
            )
        return self.found.accelerator(stage)


def read_machine(path: Path) -> Machine:
    """The machine in a file. Raises ConfigError: as ``read_machine_file``, or the file has no stages."""
    return read_machine_file(path).machine()


def read_machine_file(path: Path) -> MachineFile:
    """What a file says of a machine: a description, or the benchmark's JSON in its last line. The name of an example
    (``machine/examples``), such as ``two-large``, stands for it where there is no file of that name.

    Raises:
        ConfigError: the file cannot be read, or describes no machine.
    """
    return _read(path, EXAMPLES, "machine", _machine_file)


def read_profiles(path: Path) -> Profiles:
    """The profiles in a file: a description, or the numbers of ``Profiles.as_dict`` as JSON. The name of an example
    (``machine/examples/profiles``), such as ``three-macs``, stands for it where there is no file of that name.

    Raises:
        ConfigError: the file cannot be read, or has no profiles.
    """
    return _read(path, EXAMPLES / "profiles", "profiles", lambda _, text: _profiles(text))


def _read(path: Path, examples: Path, what: str, parse: Callable[[Path, str], T]) -> T:
    example = examples / f"{path.name.removesuffix('.yaml')}.yaml"
    if len(path.parts) == 1 and not path.exists() and example.exists():
        path = example
    try:
        return parse(path, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{what} {path}: {sentence(error)}") from error


def _machine_file(path: Path, text: str) -> MachineFile:
    if (measured := _measured(text)) is not None:
        return MachineFile(path, Machine.from_dict(measured))
    found = _mapping(text, "stages")
    described = (_ByLayer if "each_layer" in found else _ByStage).model_validate(found)
    return MachineFile(path, described.machine(), described.stages is not None)


def _measured(text: str) -> Any:
    """The benchmark's measurement, if ``text`` is its output."""
    last = text.strip().splitlines()[-1:]
    try:
        found = json.loads(last[0]) if last else None
    except ValueError:
        return None
    return found.get("machine", found) if isinstance(found, dict) and {"machine", "hops"} & set(found) else None


def _profiles(text: str) -> Profiles:
    found = _mapping(text, "model, machines and links")
    return Profiles.from_dict(found) if "version" in found else _Description.model_validate(found).profiles()


def _mapping(text: str, keys: str) -> dict[str, Any]:
    try:
        found = json.loads(text)  # far quicker than YAML, of which it is a part
    except ValueError:
        found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"a description has keys, such as {keys}")
    return found


# -- descriptions --------------------------------------------------------------------------------


class _Described(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class _Times(_Described):
    """Milliseconds by rows, and by the positions attended to."""

    rows_ms: Annotated[dict[Count, NotNegative], pydantic.Field(min_length=1)]
    decode_per_1k_ms: NotNegative = 0.0
    prompt_per_1k_ms: NotNegative = 0.0

    def costs(self) -> StageCosts:
        seconds = {rows: ms * _MS for rows, ms in self.rows_ms.items()}
        return StageCosts.through(seconds, self.decode_per_1k_ms * _MS / 1000, self.prompt_per_1k_ms * _MS / 1000)


class _Device(_Described):
    """What a pipeline's devices and one machine's have in common."""

    host_ms: NotNegative = 0.0
    draft_ms: NotNegative = 0.0
    draft_more_ms: NotNegative = 0.0
    draft_buffers: Count = 1
    launches_ahead: bool = False
    max_buffers: Count = MAX_BUFFERS
    wait_us: NotNegative = 0.0
    idle_after_s: Positive = 1.0
    idle_factor: Annotated[float, pydantic.Field(ge=1, allow_inf_nan=False)] = 1.0

    def common(self) -> dict[str, Any]:
        """The fields of ``Machine`` and ``MachineProfile``."""
        return {
            "host": self.host_ms * _MS,
            "draft": self.draft_ms * _MS,
            "draft_more": self.draft_more_ms * _MS,
            "draft_buffers": self.draft_buffers,
            "launches_ahead": self.launches_ahead,
            "device": DeviceTraits(self.max_buffers, self.wait_us * _US, self.idle_after_s, self.idle_factor),
        }


class _TimedStage(_Times):
    layers: Count
    buffers: Count = 1


class _Pipeline(_Device):
    hop_ms: NotNegative = 0.0
    per_row_us: NotNegative = 0.0

    def _of(self, layers: list[int], devices: list[tuple[StageCosts, int]], each: EachLayer | None) -> Machine:
        return Machine(
            stages=tuple(costs for costs, _ in devices),
            hops=(Hop(self.hop_ms * _MS, self.per_row_us * _US),) * len(layers),
            layers=tuple(layers),
            buffers=tuple(count for _, count in devices),
            each_layer=each,
            **self.common(),
        )


class _ByStage(_Pipeline):
    stages: Annotated[list[_TimedStage], pydantic.Field(min_length=1)]

    def machine(self) -> Machine:
        devices = [(stage.costs(), stage.buffers) for stage in self.stages]
        return self._of([stage.layers for stage in self.stages], devices, None)


class _Layer(_Times):
    buffers: Positive = 1.0


class _Stage(_Described):
    layers: Count


class _ByLayer(_Pipeline):
    each_layer: _Layer
    each_step_ms: NotNegative = 0.0
    stages: Annotated[list[_Stage], pydantic.Field(min_length=1)] | None = None

    def machine(self) -> Machine:
        """The machine; of one stage with one layer if the description has no stages."""
        each = EachLayer(self.each_layer.costs(), self.each_step_ms * _MS, self.each_layer.buffers)
        layers = [stage.layers for stage in self.stages or [_Stage(layers=1)]]
        return self._of(layers, [(each.stage(count), each.stage_buffers(count)) for count in layers], each)


class _LayerBytes(_Described):
    count: Count = 1
    kind: str = _ALL
    weights_gb: NotNegative
    kv_bytes_per_token: Bytes = 0
    kv_bytes_fixed: Bytes = 0
    kv_bytes_stored: Bytes = 0

    def layers(self) -> tuple[LayerProfile, ...]:
        kv = self.kv_bytes_per_token, self.kv_bytes_fixed, self.kv_bytes_stored
        return (LayerProfile(self.kind, round(self.weights_gb * _GB), *kv),) * self.count


class _Draft(_Described):
    name: str
    weights_gb: NotNegative = 0.0
    kv_bytes_per_token: Bytes = 0


class _Model(_Described):
    name: str = "(unnamed)"
    layers: Annotated[list[_LayerBytes], pydantic.Field(min_length=1)]
    repeat: Count = 1
    embedding_gb: NotNegative = 0.0
    head_gb: NotNegative = 0.0
    tied: bool = False
    hidden_bytes: Bytes = 0
    context_length: Count = 2**20
    draft: _Draft | None = None

    def profile(self) -> ModelProfile:
        draft = self.draft
        return ModelProfile(
            name=self.name,
            layers=tuple(layer for each in self.layers for layer in each.layers()) * self.repeat,
            embedding=round(self.embedding_gb * _GB),
            head=round(self.head_gb * _GB),
            is_tied=self.tied,
            hidden_row=self.hidden_bytes,
            context_length=self.context_length,
            draft=None
            if draft is None
            else DraftProfile(draft.name, round(draft.weights_gb * _GB), draft.kv_bytes_per_token),
        )


class _Machine(_Device):
    name: str
    free_gb: NotNegative
    address: str | None = None
    key: str | None = None
    device: str = ""
    scores_bytes_per_token: Bytes = 0
    like: str | None = None
    times: Positive = 1.0
    each_layer: _Times | None = None
    kinds: Annotated[dict[str, _Times], pydantic.Field(min_length=1)] | None = None
    embedding: _Times | None = None
    head: _Times | None = None
    each_step_ms: NotNegative = 0.0
    buffers: Positive = 1.0

    def profile(self, before: Mapping[str, MachineProfile]) -> MachineProfile:
        """``before``: the machines before this one, by name."""
        return replace(
            self._own() if self.like is None else self._like(before, self.like),
            name=self.name,
            address=self.address,
            key=self.key,
            free_bytes=round(self.free_gb * _GB),
            scores=self.scores_bytes_per_token,
            device_name=self.device,
        )

    def _like(self, before: Mapping[str, MachineProfile], name: str) -> MachineProfile:
        if name not in before:
            raise ValueError(f"machine {self.name} is like {name!r}, but no machine before it has that name")
        if both := sorted(self.model_fields_set - _BESIDE_LIKE):
            raise ValueError(f"machine {self.name} is like {name}, and has {both[0]}, too")
        return before[name].slower(self.times)

    def _own(self) -> MachineProfile:
        if (self.each_layer is None) == (self.kinds is None):
            raise ValueError(f"machine {self.name} needs each_layer, or kinds, or to be like another")
        if "times" in self.model_fields_set:
            raise ValueError(f"machine {self.name} has times, which goes with like")
        kinds = {_ALL: self.each_layer} if self.each_layer is not None else self.kinds or {}
        return MachineProfile(
            name=self.name,
            layers={kind: times.costs() for kind, times in kinds.items()},
            step=self.each_step_ms * _MS,
            embedding=self.embedding.costs() if self.embedding else StageCosts(),
            head=self.head.costs() if self.head else StageCosts(),
            buffers=self.buffers,
            **self.common(),
        )


_BESIDE_LIKE = {"name", "free_gb", "address", "key", "device", "scores_bytes_per_token", "like", "times"}


class _Link(_Described):
    source: Annotated[str, pydantic.Field(alias="from")]
    to: str
    latency_ms: NotNegative
    mb_per_second: Positive = math.inf

    def profile(self) -> LinkProfile:
        return LinkProfile(self.source, self.to, self.latency_ms * _MS, self.mb_per_second * _MB)


class _Description(_Described):
    model: _Model
    machines: Annotated[list[_Machine], pydantic.Field(min_length=1)]
    links: list[_Link] = []

    def profiles(self) -> Profiles:
        known: dict[str, MachineProfile] = {}
        found = []
        for each in self.machines:
            known[each.name] = each.profile(known)
            found.append(known[each.name])
        return Profiles(self.model.profile(), tuple(found), tuple(link.profile() for link in self.links))
