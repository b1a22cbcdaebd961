"""Reads machines from files: measured by ``splitinfer bench --mode serve``, or described by hand.

A description is YAML; times are milliseconds of one stage with its layers, by the number of rows of a step:

    stages:
      - {layers: 40, rows_ms: {1: 47, 128: 48, 512: 106, 2048: 366}, decode_per_1k_ms: 0.08, prompt_per_1k_ms: 0.01}
      - {layers: 26, rows_ms: {1: 31, 128: 32, 512: 70, 2048: 240}}
    hop_ms: 0.3             # from one stage to the next, and back
    per_row_us: 2           # of a hop, for each row of hidden states
    host_ms: 0.5            # of the coordinator, for each step
    draft_ms: 3             # for each draft
    launches_ahead: true    # as on a GPU

``decode_per_1k_ms`` and ``prompt_per_1k_ms`` are for each row of an answer and of a prompt, for each thousand positions
that it attends to.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml

from splitinfer.core.scheduler.cost_model import StageCosts
from splitinfer.errors import ConfigError
from splitinfer.machine.machine import Hop, Machine

_Positive = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
_MS, _US = 1e-3, 1e-6


class _Stage(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    layers: int
    rows_ms: Annotated[dict[int, _Positive], pydantic.Field(min_length=1)]
    decode_per_1k_ms: _Positive = 0.0
    prompt_per_1k_ms: _Positive = 0.0


class _Machine(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    stages: Annotated[list[_Stage], pydantic.Field(min_length=1)]
    hop_ms: _Positive = 0.0
    per_row_us: _Positive = 0.0
    host_ms: _Positive = 0.0
    draft_ms: _Positive = 0.0
    launches_ahead: bool = False


def read_machine(path: Path) -> Machine:
    """The machine in a file, which has a description, or the benchmark's JSON in its last line.

    Raises:
        ConfigError: the file cannot be read, or describes no machine.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"machine {path} cannot be read: {error}") from error
    measured = _measured(text)
    try:
        return _described(text) if measured is None else Machine.from_dict(measured)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"machine {path}: {where}: {first['msg'].lower()}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"machine {path}: {str(error).splitlines()[0]}") from error


def _measured(text: str) -> Any:
    """The benchmark's measurement, if ``text`` is its output."""
    last = text.strip().splitlines()[-1:]
    try:
        found = json.loads(last[0]) if last else None
    except ValueError:
        return None
    return found.get("machine", found) if isinstance(found, dict) and {"machine", "hops"} & set(found) else None


def _described(text: str) -> Machine:
    description = _Machine.model_validate(yaml.safe_load(text))
    return Machine(
        tuple(
            StageCosts.through(
                {rows: ms * _MS for rows, ms in stage.rows_ms.items()},
                stage.decode_per_1k_ms * _MS / 1000,
                stage.prompt_per_1k_ms * _MS / 1000,
            )
            for stage in description.stages
        ),
        tuple(Hop(description.hop_ms * _MS, description.per_row_us * _US) for _ in description.stages),
        tuple(stage.layers for stage in description.stages),
        description.host_ms * _MS,
        description.draft_ms * _MS,
        description.launches_ahead,
    )
