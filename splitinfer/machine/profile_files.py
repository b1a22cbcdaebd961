"""Reads profiles from files: as they were measured (JSON), or described by hand for machines that one does not have.

A description is YAML. Times are those of one layer, under the names of a machine file (``machine.files``); bytes are GB
of 10^9 where a name says so:

    model:
      name: some/model-4bit                 # as a layout names it
      layers: [{count: 66, weights_gb: 0.55, kv_bytes_per_token: 4096}]
      embedding_gb: 0.7
      head_gb: 0.7                          # tied: true where both are the same weights
      hidden_bytes: 16384                   # of one row of hidden states on a link
      context_length: 131072
      draft: {name: some/small-4bit, weights_gb: 0.6, kv_bytes_per_token: 10000}
    machines:                               # the coordinator first
      - name: studio
        free_gb: 40
        each_layer: {rows_ms: {1: 1.17, 8: 1.3, 32: 3.5, 512: 53.8}, decode_per_1k_ms: 0.002}
        each_step_ms: 0.2
        buffers: 2.2                        # command buffers of a step, for each layer
        head: {rows_ms: {1: 1.2, 64: 6}}
        host_ms: 0.5
        draft_ms: 3
        launches_ahead: true
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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import pydantic
import yaml

from splitinfer.core.scheduler.cost_model import StageCosts
from splitinfer.errors import ConfigError
from splitinfer.machine.device_queue import MAX_BUFFERS, DeviceTraits
from splitinfer.machine.files import EXAMPLES, MS, US, Count, NotNegative, Positive, Times, refusing
from splitinfer.machine.profile import (
    DraftProfile,
    LayerProfile,
    LinkProfile,
    MachineProfile,
    ModelProfile,
    Profiles,
)

_GB, _MB = 1e9, 1e6
_ALL = "layer"  # the kind of layers that are all alike
_Bytes = Annotated[int, pydantic.Field(ge=0)]


class ProfileSource(Protocol):
    """Where profiles come from: a file, or machines that are measured."""

    def profiles(self) -> Profiles:
        """The profiles.

        Raises:
            SplitinferError: there are none.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """Profiles in a file. ``model``: a name that replaces the one in it."""

    path: Path
    model: str | None = None

    def profiles(self) -> Profiles:
        """See ``ProfileSource``.

        Raises:
            ConfigError: the file cannot be read, or has no profiles.
        """
        found = read_profiles(self.path)
        return found if self.model is None else replace(found, model=replace(found.model, name=self.model))


def read_profiles(path: Path) -> Profiles:
    """The profiles in a file: a description, or the numbers of ``Profiles.as_dict`` as JSON. The name of an example
    (``machine/examples/profiles``), such as ``three-macs``, stands for it where there is no file of that name.

    Raises:
        ConfigError: the file cannot be read, or has no profiles.
    """
    example = EXAMPLES / "profiles" / f"{path.name.removesuffix('.yaml')}.yaml"
    if len(path.parts) == 1 and not path.exists() and example.exists():
        path = example
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"profiles {path} cannot be read: {error}") from error
    with refusing(path, "profiles"):
        found = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
        if not isinstance(found, dict):
            raise ValueError("a description has the keys model, machines and links")
        return Profiles.from_dict(found) if "version" in found else _Description.model_validate(found).profiles()


class _Shape(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class _LayerBytes(_Shape):
    count: Count = 1
    kind: str = _ALL
    weights_gb: NotNegative
    kv_bytes_per_token: _Bytes = 0
    kv_bytes_fixed: _Bytes = 0
    kv_bytes_stored: _Bytes = 0

    def layers(self) -> tuple[LayerProfile, ...]:
        one = LayerProfile(
            self.kind, round(self.weights_gb * _GB), self.kv_bytes_per_token, self.kv_bytes_fixed, self.kv_bytes_stored
        )
        return (one,) * self.count


class _Draft(_Shape):
    name: str
    weights_gb: NotNegative = 0.0
    kv_bytes_per_token: _Bytes = 0

    def profile(self) -> DraftProfile:
        return DraftProfile(self.name, round(self.weights_gb * _GB), self.kv_bytes_per_token)


class _Model(_Shape):
    name: str = "(unnamed)"
    layers: Annotated[list[_LayerBytes], pydantic.Field(min_length=1)]
    repeat: Count = 1
    embedding_gb: NotNegative = 0.0
    head_gb: NotNegative = 0.0
    tied: bool = False
    hidden_bytes: _Bytes = 0
    context_length: Count = 2**20
    draft: _Draft | None = None

    def profile(self) -> ModelProfile:
        return ModelProfile(
            name=self.name,
            layers=tuple(layer for each in self.layers for layer in each.layers()) * self.repeat,
            embedding=round(self.embedding_gb * _GB),
            head=round(self.head_gb * _GB),
            is_tied=self.tied,
            hidden_row=self.hidden_bytes,
            context_length=self.context_length,
            draft=None if self.draft is None else self.draft.profile(),
        )


class _Machine(_Shape):
    name: str
    free_gb: NotNegative
    address: str | None = None
    key: str | None = None
    device: str = ""
    scores_bytes_per_token: _Bytes = 0
    like: str | None = None
    times: Positive = 1.0
    each_layer: Times | None = None
    kinds: Annotated[dict[str, Times], pydantic.Field(min_length=1)] | None = None
    each_step_ms: NotNegative = 0.0
    embedding: Times | None = None
    head: Times | None = None
    host_ms: NotNegative = 0.0
    draft_ms: NotNegative = 0.0
    draft_more_ms: NotNegative = 0.0
    draft_buffers: Count = 1
    buffers: Positive = 1.0
    launches_ahead: bool = False
    max_buffers: Count = MAX_BUFFERS
    wait_us: NotNegative = 0.0
    idle_after_s: Positive = 1.0
    idle_factor: Annotated[float, pydantic.Field(ge=1, allow_inf_nan=False)] = 1.0

    def profile(self, before: Mapping[str, MachineProfile]) -> MachineProfile:
        """``before``: the machines before this one, by name."""
        costs = self._own() if self.like is None else self._like(before, self.like)
        return replace(
            costs,
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
            step=self.each_step_ms * MS,
            embedding=_costs(self.embedding),
            head=_costs(self.head),
            host=self.host_ms * MS,
            draft=self.draft_ms * MS,
            draft_more=self.draft_more_ms * MS,
            draft_buffers=self.draft_buffers,
            buffers=self.buffers,
            launches_ahead=self.launches_ahead,
            device=DeviceTraits(self.max_buffers, self.wait_us * US, self.idle_after_s, self.idle_factor),
        )


_BESIDE_LIKE = {"name", "free_gb", "address", "key", "device", "scores_bytes_per_token", "like", "times"}


def _costs(times: Times | None) -> StageCosts:
    return StageCosts() if times is None else times.costs()


class _Link(_Shape):
    source: Annotated[str, pydantic.Field(alias="from")]
    to: str
    latency_ms: NotNegative
    mb_per_second: Positive | None = None

    def profile(self) -> LinkProfile:
        bandwidth = math.inf if self.mb_per_second is None else self.mb_per_second * _MB
        return LinkProfile(self.source, self.to, self.latency_ms * MS, bandwidth)


class _Description(_Shape):
    model: _Model
    machines: Annotated[list[_Machine], pydantic.Field(min_length=1)]
    links: list[_Link] = []

    def profiles(self) -> Profiles:
        """The profiles that are described."""
        known: dict[str, MachineProfile] = {}
        for each in self.machines:
            if each.name in known:
                raise ValueError(f"two machines are named {each.name!r}")
            known[each.name] = each.profile(known)
        return Profiles(self.model.profile(), tuple(known.values()), tuple(link.profile() for link in self.links))
