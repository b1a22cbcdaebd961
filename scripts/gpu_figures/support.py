"""Which architectures of mlx-lm run through cut stages on this device: whole against split.

Every architecture is built tiny, cut in the middle, and run in chunks and row by row, as in tests/matrix. Errors are
relative to a row's norm: of the two stages against our whole model, and of our whole model against plain mlx-lm; also
without a cache, because mlx-lm's own may be shorter than the window of its mask.

The survey of a model traces MLX's graph, which is another on a GPU, where ``mx.fast`` has nodes of its own.
``scripts/matrix`` compares all cuts to the last bit, on the CPU backend.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from gpu_figures.steps import row_errors
from splitinfer.errors import CannotCut, ConfigError
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.rows.kv_trial import why_no_blocks
from splitinfer.models.rows.step import StepModel
from splitinfer.probes.child import ProbeReport
from splitinfer.probes.finding import passed

_MATRIX = Path(__file__).parents[2] / "tests" / "matrix"
_DECODED = 3  # tokens, each in a step of one row


def measure(options: Mapping[str, Any], report: ProbeReport) -> None:
    """Report each architecture whose place is ``number``, counted modulo ``of``, or those in ``names``.

    Raises:
        ConfigError: this is no clone of the repository, whose tests describe the architectures.
    """
    if not _MATRIX.is_dir():
        raise ConfigError("the architectures are described in a clone of the repository only (tests/matrix)")
    sys.path.insert(0, str(_MATRIX))
    configs = importlib.import_module("configs").configurations()
    compare = importlib.import_module("compare")
    names: Sequence[str] = options["names"] or sorted(configs)
    for dtype in options["dtypes"]:
        found = []
        for name in names[options["number"] :: options["of"]]:
            find = partial(_compare, compare, configs[name], getattr(mx, dtype))
            found.append(report.guarded(f"{name}, {dtype}", find))
        report(passed(f"summary, {dtype}", "", summary([one.numbers for one in found])))


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many of some findings there are of each kind, and the largest errors.

    >>> right = {"to_mlx_lm": 0.3, "to_mlx_lm_without_cache": 0.0, "split_to_whole": 0.0, "equal": True}
    >>> found = summary([{}, right])
    >>> found["equal"], found["failed"], found["largest_to_mlx_lm"]
    (1, 1, 0.0)
    """
    split = [one for one in found if "split_to_whole" in one]
    to_mlx_lm = [min(one["to_mlx_lm"], one["to_mlx_lm_without_cache"]) for one in found if "to_mlx_lm" in one]
    return {
        "configurations": len(found),
        "equal": sum(one["equal"] for one in split),
        "other": sum(not one["equal"] for one in split),
        "refused": sum("refused" in one for one in found),
        "failed": sum(not one for one in found),
        "largest_split_to_whole": max((one["split_to_whole"] for one in split), default=None),
        "largest_to_mlx_lm": max(to_mlx_lm, default=None),
    }


def _compare(compare: Any, config: Mapping[str, Any], dtype: mx.Dtype) -> dict[str, Any]:
    model = compare.build(config)
    model.set_dtype(dtype)
    tokens, plain = compare.reference(model, _DECODED)
    whole = StageModel(model, 0, len(model.layers))
    ours = compare.run([whole], tokens, compare.CHUNK)
    found: dict[str, Any] = {
        "is_number": not mx.isnan(ours).any().item(),
        "to_mlx_lm": max(row_errors(ours[0], plain[0])),
        "to_mlx_lm_without_cache": max(row_errors(ours[0], model(tokens)[0])),
        "way": StepModel(whole).way.value,
        "kept_kv": why_no_blocks(whole) is None,
    }
    try:
        split = compare.run(_cut(compare, model), tokens, compare.CHUNK)
    except CannotCut as error:
        return {**found, "refused": str(error)}
    to_whole = max(row_errors(split[0], ours[0]))
    return {**found, "split_to_whole": to_whole, "equal": bool(mx.array_equal(split, ours).item())}


def _cut(compare: Any, model: nn.Module) -> Sequence[StageModel]:
    """Two stages, cut as near to the middle as there is a cut.

    Raises:
        CannotCut: there is none.
    """
    structure, layers = ModelStructure(model), len(model.layers)
    for k in sorted(range(1, layers), key=lambda k: abs(2 * k - layers)):
        try:
            stages: Sequence[StageModel] = compare.cut(structure, [k])
        except CannotCut as error:
            refused = error
        else:
            return stages
    raise refused
