"""Reads machines and profiles from files: as they were measured (JSON), or described by hand (YAML).

A *machine* is a whole pipeline; docs/fast/serving.md lists its keys. Times are milliseconds of one stage with its
layers, by the number of rows of a step. With ``each_layer`` they are those of one layer; then any cut can be tried, and
the stages may be left out where a layout has them.

*Profiles* are of a model, of machines that may run it, the coordinator first, and of their links; docs/fast/planning.md
has an example. Times are those of one layer, under the same names; bytes are GB of 10^9 where a name says so.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import yaml
from pydantic import AfterValidator, Field

from splitinfer.core.costs.stage import StageCosts
from splitinfer.errors import ConfigError
from splitinfer.machine.device_queue import MAX_BUFFERS, DeviceTraits
from splitinfer.machine.machine import EachLayer, Hop, Machine
from splitinfer.machine.numbers import Bytes, Count, NotNegative, Positive, sentence
from splitinfer.machine.profile import DraftProfile, LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles

EXAMPLES = Path(__file__).parent / "examples"
T = TypeVar("T")
_ALL = "layer"  # the kind of layers that are all alike


def read_machine(path: Path) -> Machine:
    """The machine in a file: a description, or the benchmark's JSON in its last line. The name of an example
    (``machine/examples``), such as ``two-large``, stands for it where there is no file of that name.

    Raises:
        ConfigError: the file cannot be read, describes no machine, or gives the costs of each layer, and no stages.
    """
    path, found, has_stages = _read(path, EXAMPLES, "machine", _machine)
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
    path, found, _ = _read(path, EXAMPLES, "machine", _machine)
    if found.each_layer is not None:
        return [found.alone(0, count) for count in layers]
    if found.num_stages != len(layers):
        raise ConfigError(
            f"machine {path} has the times of {found.num_stages} stages, but the layout has {len(layers)}; take "
            "another machine, or one that says what each layer costs"
        )
    return [found.alone(stage, count) for stage, count in enumerate(found.layers)]


def check_each_layer(path: Path) -> None:
    """Raises ConfigError if a machine's file gives the costs of stages, and not those of each layer."""
    path, found, _ = _read(path, EXAMPLES, "machine", _machine)
    if found.each_layer is None:
        raise ConfigError(
            f"machine {path} gives the times of whole stages; to plan, it must give those of each layer (each_layer)"
        )


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


def _machine(path: Path, text: str) -> tuple[Path, Machine, bool]:
    """A machine, where it was found, and whether the file says how many layers each stage has; if not, the machine has
    one stage of one layer."""
    if (measured := _measured(text)) is not None:
        return path, Machine.from_dict(measured), True
    found = _mapping(text, "stages")
    described = (_ByLayer if "each_layer" in found else _ByStage).model_validate(found)
    return path, described.machine(), described.stages is not None


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


# -- descriptions: a key names its unit; the field behind it is named and measured as in what it becomes ---------------

_Ms = Annotated[NotNegative, AfterValidator(lambda found: found * 1e-3)]
_Us = Annotated[NotNegative, AfterValidator(lambda found: found * 1e-6)]
_Gb = Annotated[NotNegative, AfterValidator(lambda found: round(found * 1e9))]
_MbPerSecond = Annotated[Positive, AfterValidator(lambda found: found * 1e6)]


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

    def costs(self) -> StageCosts:
        return StageCosts.through(self.rows, self.decode, self.prompt)


class _Device(_Described):
    """What a pipeline's devices and one machine's have in common."""

    host: _Ms = Field(0.0, alias="host_ms")
    draft: _Ms = Field(0.0, alias="draft_ms")
    draft_more: _Ms = Field(0.0, alias="draft_more_ms")
    draft_buffers: Count = 1
    launches_ahead: bool = False
    max_buffers: Count = MAX_BUFFERS
    wait: _Us = Field(0.0, alias="wait_us")
    idle_after: Positive = Field(1.0, alias="idle_after_s")
    idle_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0

    def common(self) -> dict[str, Any]:
        """The fields of ``Machine`` and ``MachineProfile``."""
        traits = DeviceTraits(**self.values("max_buffers", "wait", "idle_after", "idle_factor"))
        return {**self.values("host", "draft", "draft_more", "draft_buffers", "launches_ahead"), "device": traits}


class _TimedStage(_Times):
    layers: Count
    buffers: Count = 1


class _Pipeline(_Device):
    hop: _Ms = Field(0.0, alias="hop_ms")
    per_row: _Us = Field(0.0, alias="per_row_us")

    def _of(self, layers: list[int], devices: list[tuple[StageCosts, int]], each: EachLayer | None) -> Machine:
        return Machine(
            stages=tuple(costs for costs, _ in devices),
            hops=(Hop(self.hop, self.per_row),) * len(layers),
            layers=tuple(layers),
            buffers=tuple(count for _, count in devices),
            each_layer=each,
            **self.common(),
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


class _LayerBytes(_Described):
    count: Count = 1
    kind: str = _ALL
    weights: _Gb = Field(alias="weights_gb")
    kv_per_token: Bytes = Field(0, alias="kv_bytes_per_token")
    kv_fixed: Bytes = Field(0, alias="kv_bytes_fixed")
    kv_stored: Bytes = Field(0, alias="kv_bytes_stored")

    def layers(self) -> tuple[LayerProfile, ...]:
        return (LayerProfile(**self.model_dump(exclude={"count"})),) * self.count


class _Draft(_Described):
    name: str
    weights: _Gb = Field(0, alias="weights_gb")
    kv_per_token: Bytes = Field(0, alias="kv_bytes_per_token")


class _Model(_Described):
    name: str = "(unnamed)"
    layers: Annotated[list[_LayerBytes], Field(min_length=1)]
    repeat: Count = 1
    embedding: _Gb = Field(0, alias="embedding_gb")
    head: _Gb = Field(0, alias="head_gb")
    is_tied: bool = Field(False, alias="tied")
    hidden_row: Bytes = Field(0, alias="hidden_bytes")
    context_length: Count = 2**20
    draft: _Draft | None = None

    def profile(self) -> ModelProfile:
        layers = tuple(layer for each in self.layers for layer in each.layers()) * self.repeat
        draft = None if self.draft is None else DraftProfile(**self.draft.model_dump())
        names = ("name", "embedding", "head", "is_tied", "hidden_row", "context_length")
        return ModelProfile(layers=layers, draft=draft, **self.values(*names))


class _Machine(_Device):
    name: str
    free_bytes: _Gb = Field(alias="free_gb")
    address: str | None = None
    key: str | None = None
    device_name: str = Field("", alias="device")
    scores: Bytes = Field(0, alias="scores_bytes_per_token")
    like: str | None = None
    times: Positive = 1.0
    each_layer: _Times | None = None
    kinds: Annotated[dict[str, _Times], Field(min_length=1)] | None = None
    embedding: _Times | None = None
    head: _Times | None = None
    step: _Ms = Field(0.0, alias="each_step_ms")
    buffers: Positive = 1.0

    def profile(self, before: Mapping[str, MachineProfile]) -> MachineProfile:
        """``before``: the machines before this one, by name."""
        own = self._own() if self.like is None else self._like(before, self.like)
        return replace(own, **self.values("name", "address", "key", "free_bytes", "scores", "device_name"))

    def _like(self, before: Mapping[str, MachineProfile], name: str) -> MachineProfile:
        if name not in before:
            raise ValueError(f"machine {self.name} is like {name!r}, but no machine before it has that name")
        given = {_Machine.model_fields[field].alias or field for field in self.model_fields_set}
        if both := sorted(given - _BESIDE_LIKE):
            raise ValueError(f"machine {self.name} is like {name}, and has {both[0]}, too")
        return before[name].slower(self.times)

    def _own(self) -> MachineProfile:
        if (self.each_layer is None) == (self.kinds is None):
            raise ValueError(f"machine {self.name} needs each_layer, or kinds, or to be like another")
        if "times" in self.model_fields_set:
            raise ValueError(f"machine {self.name} has times, which goes with like")
        kinds = {_ALL: self.each_layer} if self.each_layer is not None else self.kinds or {}
        return MachineProfile(
            layers={kind: times.costs() for kind, times in kinds.items()},
            embedding=self.embedding.costs() if self.embedding else StageCosts(),
            head=self.head.costs() if self.head else StageCosts(),
            **self.values("name", "step", "buffers"),
            **self.common(),
        )


_BESIDE_LIKE = {"name", "free_gb", "address", "key", "device", "scores_bytes_per_token", "like", "times"}


class _Link(_Described):
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    latency: _Ms = Field(alias="latency_ms")
    bytes_per_second: _MbPerSecond = Field(math.inf, alias="mb_per_second")


class _Description(_Described):
    model: _Model
    machines: Annotated[list[_Machine], Field(min_length=1)]
    links: list[_Link] = []

    def profiles(self) -> Profiles:
        known: dict[str, MachineProfile] = {}
        found = []
        for each in self.machines:
            known[each.name] = each.profile(known)
            found.append(known[each.name])
        links = tuple(LinkProfile(**link.model_dump()) for link in self.links)
        return Profiles(self.model.profile(), tuple(found), links)
