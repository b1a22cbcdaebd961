"""A drafter that was trained on its target's hidden states: what each stage reads of it, and what the last one runs.

It is among the model's own tensors (``mtp``), or in a folder of its own whose config.json says of what kind it is
(``eagle3``, ``dflash``). Every stage taps its layers; the last one has the rest.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.errors import ModelError
from splitinfer.models import dflash, eagle3
from splitinfer.models.building import cast_floats
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.cut import StageModel
from splitinfer.models.dflash import DFlash, is_dflash
from splitinfer.models.eagle3 import Eagle3, is_eagle3
from splitinfer.models.layers import type_name
from splitinfer.models.mtp import PREFIX, PredictionHeads, tensors_of
from splitinfer.models.taps import check_width
from splitinfer.models.with_heads import Heads, WithHeads

Arrays = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a stage has of a drafter. ``weights``: by name, not evaluated; ``heads``: on the last stage."""

    weights: dict[str, mx.array]
    heads: WithHeads | None = None

    def outputs(self) -> Iterator[mx.array]:
        """Arrays that depend on all that is read for it."""
        yield from self.weights.values()
        if self.heads is not None:
            yield from self.heads.probe()


def is_trained(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is that of a drafter that runs on the last stage."""
    return is_eagle3(checkpoint.config) or is_dflash(checkpoint.config)


def at_once(checkpoint: Checkpoint) -> int:
    """The most tokens that a drafter drafts at once; 0 where it drafts one after the other."""
    return dflash.at_once(checkpoint.config) if is_dflash(checkpoint.config) else 0


def read_of(drafter: Checkpoint, *, is_last: bool) -> frozenset[str]:
    """The names of the tensors that a stage reads of a drafter in a folder of its own: of the projection, or all."""
    return frozenset(name for name in drafter.tensors if is_last or name.removeprefix("model.").startswith("fc."))


def arrays_of(drafter: Checkpoint, *, is_last: bool) -> dict[str, mx.array]:
    """Those tensors, which are read when they are computed."""
    found = dict[str, mx.array]()
    for path, names in drafter.paths_of(read_of(drafter, is_last=is_last)).items():
        there: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        found |= {name: there[name] for name in names if name in there}
    return found


def join(stage: StageModel, drafter: Checkpoint, arrays: Arrays, dtype: str | None) -> Trained:
    """Have a stage tap the layers that a drafter reads, and run the drafter if it is the last one.

    Raises:
        ModelError: there is no drafter, it belongs to another model, or this one cannot have any.
    """
    kind, own = (_of_folder if is_trained(drafter) else _mtp), dict[str, mx.array]()
    try:
        parts, make = kind(stage, drafter, arrays)
        for index, part in parts.items():
            if isinstance(part, nn.Module) and stage.start <= index < stage.end:
                cast_floats(part, dtype)
                own |= {f"taps.{index}.{name}": array for name, array in tree_flatten(part.parameters())}
        stage.tap(parts)
        if not stage.is_last:
            return Trained(own)
        heads = make()
        cast_floats(heads, dtype)
        found = WithHeads(stage, heads)
        list(found.probe())
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the drafter in {drafter.folder} does not fit the layers of {type_name(stage.whole)} ({error}); it "
            "belongs to another model, or is of a form that is not known"
        ) from error
    return Trained(own | {f"heads.{name}": array for name, array in tree_flatten(heads.parameters())}, found)


_Kind = tuple[dict[int, Callable[[mx.array], mx.array]], Callable[[], Heads]]


def _mtp(stage: StageModel, drafter: Checkpoint, arrays: Arrays) -> _Kind:
    if not tensors_of(arrays, stage.num_layers):
        raise ModelError(
            f"{drafter.folder} has no prediction heads ({PREFIX}* or model.layers.{stage.num_layers}.*): mlx-lm "
            "leaves them out when it converts; copy these tensors from the original repository into a file "
            "model-mtp.safetensors of this folder, or draft with a small model or 'ngram'"
        )
    return {stage.num_layers - 1: lambda hidden: hidden}, lambda: PredictionHeads(stage.whole, arrays)


def _of_folder(stage: StageModel, drafter: Checkpoint, arrays: Arrays) -> _Kind:
    config, model = drafter.config, stage.whole
    module, kind = (dflash, DFlash) if is_dflash(config) else (eagle3, Eagle3)
    taps = module.taps_of(config, model, arrays)
    if not (stage.is_first and stage.is_last):
        check_width(model, module.renamed(arrays))
    return taps, lambda: kind(config, model, arrays)
