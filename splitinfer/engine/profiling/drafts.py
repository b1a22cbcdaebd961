"""The costs of a drafter. The coordinator's drafter is measured: a round for one sequence, and for each further one.
Heads on the last stage cost as much as similar layers of the model on that machine."""

import statistics
import time
from itertools import islice

import mlx.core as mx
from mlx.utils import tree_flatten

from splitinfer.core.sequence import SamplingParams
from splitinfer.core.sequence import Sequence as Tokens
from splitinfer.engine.device.device import open_device
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.engine.drafts.drafters import model_in
from splitinfer.machine.profile import DraftProfile
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.folder.hub import open_model
from splitinfer.models.load.building import build_model, made_up, placeholders_of
from splitinfer.models.load.layer_kinds import DescribedModel
from splitinfer.models.load.loader import in_bunches, kv_need, resolve_dtype
from splitinfer.models.load.trained import join

_ROUNDS, _SEVERAL = 6, 8  # rounds, without counting the first; sequences in a round of several
_PROMPT = 16  # tokens
_TOGETHER = 64 * 2**20  # bytes of weights made at a time


def measure_draft(name: str, dtype: str, vocab_size: int) -> tuple[DraftProfile, float, float]:
    """Return a drafter's bytes, the seconds of a draft, and the seconds of each further sequence in a round. Its
    weights are made up. N-grams cost 0 s.

    Raises:
        ModelError: the model does not exist.
    """
    small = model_in(name)
    if small is None:
        return DraftProfile(name), 0.0, 0.0
    checkpoint = open_model(small)
    model = build_model(checkpoint, made_up(checkpoint), resolve_dtype(dtype))
    parameters = [array for _, array in tree_flatten(model.parameters())]
    for few in in_bunches(parameters, _TOGETHER):
        mx.eval(few)
    structure = ModelStructure(model)
    stage = StageModel(model, 0, structure.num_layers, structure)
    per_token = kv_need(stage)[1]
    drafter = DraftModel(small, stage, vocab_size)
    drafter.use_device(open_device(0, (0, 1)))
    one, several = _round(drafter, 1), _round(drafter, _SEVERAL)
    profile = DraftProfile(name, sum(array.nbytes for array in parameters), per_token)
    return profile, one, max(0.0, several - one) / (_SEVERAL - 1)


def describe_heads(name: str, checkpoint: Checkpoint, described: DescribedModel, dtype: str | None) -> DraftProfile:
    """Return the bytes of the heads in ``checkpoint``, which draft on the last stage, and the kind of the model's
    layers that they resemble. Reads no weights.

    Raises:
        ModelError: the checkpoint has no heads, or they cannot run.
    """
    structure, last = described.structure, described.structure.num_layers - 1
    stage = StageModel(structure.model, last, last + 1, structure, checks=False)
    weights = sum(array.nbytes for array in join(stage, checkpoint, placeholders_of(checkpoint), dtype).values())
    heads = stage.heads.heads
    like = described.profile.layers[heads.like].kind
    return DraftProfile(name, weights, stage.heads.bytes_per_token(stage.make_caches()), like, heads.at_once)


def _round(drafter: DraftModel, count: int) -> float:
    """Return the median seconds of a round of drafts for ``count`` sequences."""
    sequences = [_sequence(i) for i in range(count)]
    seconds, began = list[float](), time.monotonic()
    for drafts in islice(drafter.draft_together(sequences, [_ROUNDS] * count), _ROUNDS):
        now = time.monotonic()
        own = [draft.seconds for draft in drafts if draft is not None]
        known = [one for one in own if one is not None]
        seconds.append(sum(known) if known else now - began)
        began = now
    for sequence in sequences:
        drafter.forget(sequence.seq_id)
    return statistics.median(seconds[1:] or [0.0])


def _sequence(number: int) -> Tokens:
    tokens = [5 + (7 * at + 31 * number) % 100 for at in range(_PROMPT)]
    return Tokens(seq_id=number, tokens=tokens, params=SamplingParams(temperature=0.7), seed=number)
