"""One architecture, whole and cut everywhere: which cuts are right, which are refused, and what else holds.

The reference is plain mlx-lm, and the arithmetic of a cut model is that of the whole one: their logits
have to be equal to the last bit. Where mlx-lm's own cache of a sliding window would round differently
from ours, our whole model is compared with mlx-lm within a tolerance, and the cut ones with our whole
one exactly.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from configs import VOCAB, Config
from metal import install
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from splitinfer.core.kv.rewind import NEVER, WITHIN_DRAFTS, least_rewind
from splitinfer.errors import CannotCut
from splitinfer.models.caches.caches import WindowKVCache, rewind_limit
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.rollback import Rollback
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library import mlx_vlm
from splitinfer.models.library.graph import arrays_read
from splitinfer.models.load.loader import Survey, load_stage, survey
from splitinfer.models.rows import step_trial
from splitinfer.models.rows.kv_trial import try_rollback, why_no_blocks
from splitinfer.models.rows.rounding import Errors
from splitinfer.models.rows.step import StepModel, Way

sys.path.insert(0, str(Path(__file__).parents[1]))
from plans import Planned
from tiny import _spread

NUM_PROMPT = 40
NUM_DECODED, FEW_DECODED = 12, 7
CHUNK = 16
OTHER_CHUNKS = (NUM_PROMPT, 13)  # the last of 13 has a single row, which some models treat differently
TOLERANCE = 1e-4
ROLLBACK = 5
TOKEN_MAP = [min(token, VOCAB - 3) for token in range(VOCAB)]  # which tokens n-grams are made of
_RIGHT = 3  # rows of a block before it is rolled back

Stages = Sequence[StageModel]
Make = Callable[[Config], nn.Module]


@dataclass(frozen=True, slots=True)
class Finding:
    """What holds for one configuration. ``refused``: the reason for each cut that is; ``together``: how steps of
    many sequences are run; ``kept``: where others can go on from KV that is kept."""

    num_cuts: int
    refused: dict[int, str]
    any_chunking: bool
    rollback: str
    together: str
    kept: str
    notes: tuple[str, ...]

    @property
    def num_right(self) -> int:
        """Cuts into two that are right; a wrong one is an error, never a finding."""
        return self.num_cuts - len(self.refused)


def build(config: Config, seed: int = 0, make: Make | None = None) -> nn.Module:
    """A model with random weights, spread so that its tokens vary."""
    install()
    mx.random.seed(seed)
    model = (make or mlx_lms)(copy.deepcopy(config))
    model.update(tree_map_with_path(_weights, model.parameters()))
    model.eval()
    return model


def mlx_lms(config: Config) -> nn.Module:
    """An instance of mlx-lm's class."""
    model_class, args_class = _get_classes(config)
    return cast(nn.Module, model_class(args_class.from_dict(config)))


def mlx_vlms(config: Config) -> nn.Module:
    """The language model in an instance of mlx-vlm's class."""
    utils = mlx_vlm.module("utils")
    package, _ = utils.get_model_and_args(config)
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    args, parts = package.ModelConfig.from_dict(config), ["text", "vision", "perceiver", "projector", "audio"]
    model = package.Model(utils.update_module_configs(args, package, config, parts)).language_model
    with TemporaryDirectory() as folder:
        (Path(folder) / "engram_token_map.json").write_text(json.dumps(TOKEN_MAP))
        return mlx_vlm.with_ngrams(cast(nn.Module, model), Path(folder))


def save(
    folder: Path,
    config: Config,
    make: Make | None = None,
    *,
    bits: int | None = None,
    change: Callable[[dict[str, mx.array]], dict[str, mx.array]] = dict,
) -> nn.Module:
    """A model with random weights, and its checkpoint in ``folder``. ``change``: of the weights that are written."""
    model, stored = build(config, make=make), dict(config)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        stored["quantization"] = {"group_size": 32, "bits": bits}
    prefix = "" if make is None else "language_model."
    weights = {f"{prefix}{path}": array for path, array in tree_flatten(model.parameters())}
    if make is not None and config["model_type"] == "deepseek_v41":
        weights |= {f"image_{part}": mx.zeros((config["hidden_size"],)) for part in ("start", "end", "newline")}
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "engram_token_map.json").write_text(json.dumps(TOKEN_MAP))
    mx.save_safetensors(str(folder / "model.safetensors"), change(weights))
    return model


def lively(
    config: Config, num_decoded: int = NUM_DECODED, make: Make | None = None
) -> tuple[nn.Module, mx.array, mx.array]:
    """A model whose answer varies, with the tokens of prompt and greedy answer, and their logits."""
    for seed in range(5):
        model = build(config, seed, make)
        tokens, expected = reference(model, num_decoded)
        if len(set(tokens[0, -num_decoded:].tolist())) > 2:
            return model, tokens, expected
    raise AssertionError("every reference repeats itself: choose other weights")


def _weights(path: str, x: mx.array) -> mx.array:
    if x.dtype in (mx.uint8, mx.uint32):  # packed
        return mx.random.randint(0, 2**15, x.shape).astype(x.dtype)
    if x.dtype in (mx.int32, mx.int64):  # numbers that a model's class has made, as for hashing
        return x
    if x.ndim == 0:  # a factor, which a class may make 0
        return mx.where(x == 0, mx.ones_like(x), x)
    spread: mx.array = _spread(path, x)
    # A tied head over large embeddings repeats its input for ever.
    return spread * 0.1 if "embed" in path else spread


def examine(config: Config, *, each_alone: bool = True, make: Make | None = None) -> Finding:
    """Compare every cut with the whole model.

    Args:
        each_alone: cut into two at every layer, and into three here and there. Otherwise every cut is one of several
            of a model: that takes two runs, however many layers there are; KV is kept in the last half only, and the
            answer is shorter.

    Raises:
        AssertionError: a cut that was not refused is wrong.
    """
    model, tokens, expected = lively(config, NUM_DECODED if each_alone else FEW_DECODED, make)
    mlx_vlm.without_detours(model)
    whole = [StageModel(model, 0, len(model.layers))]
    straight = run(whole, tokens, CHUNK)
    notes = _check_whole(whole, tokens, straight, expected)
    others = {chunk: run(whole, tokens, chunk) for chunk in OTHER_CHUNKS}
    moves = any(difference(straight, other) > TOLERANCE for other in others.values())
    if moves:
        notes.append("its own logits depend on the chunks of the prompt by more than rounding")
    any_chunking = all(equal(straight, other) for other in others.values())
    num_cuts = len(model.layers) - 1
    rollback, together, kept = _rollback(whole), _together(whole[0]), _kept(whole[0])
    try:
        structure = ModelStructure(model)
    except CannotCut as error:
        refused = dict.fromkeys(range(1, num_cuts + 1), str(error))
        return Finding(num_cuts, refused, any_chunking, rollback, together, kept, tuple(notes))
    pairs, refused = _cut_everywhere(structure)
    right = list(pairs)
    for borders in _each_alone(right) if each_alone else _by_turns(right):
        stages = pairs[borders[0]] if len(borders) == 1 else cut(structure, borders)
        assert equal(run(stages, tokens, CHUNK), straight), f"cut at {borders}: other logits than whole"
        _check_reads(stages, structure)
    if right:
        stages = pairs[right[len(right) // 2]]
        for chunk, other in others.items():
            assert equal(run(stages, tokens, chunk), other), f"cut, chunks of {chunk}: other logits than whole"
        _check_rows(stages, whole, tokens)
        _together(stages[-1])
        looked_at = stages if each_alone else stages[-1:]
        assert kept == "no" or all(_kept(stage) != "no" for stage in looked_at), "kept whole, and not in halves"
        if rollback != "none" and not moves:
            _check_rollback(stages, tokens, straight)
    return Finding(num_cuts, refused, any_chunking, rollback, together, kept, (*notes, *_notes(structure, right)))


def cut(structure: ModelStructure, borders: Sequence[int]) -> Stages:
    ends = [0, *borders, structure.num_layers]
    return [StageModel(structure.model, start, end, structure) for start, end in pairwise(ends)]


def loaded(
    checkpoint: Checkpoint, ends: Sequence[int], dtype: str | None = None
) -> tuple[list[Survey], list[StageModel]]:
    """Stages from files, which end behind these layers, and what was surveyed of each."""
    parts = list(pairwise((0, *ends)))
    found = [survey(checkpoint, *part, dtype) for part in parts]
    return found, [
        load_stage(checkpoint, one, *part, dtype, lambda *_: None) for one, part in zip(found, parts, strict=True)
    ]


def _cut_everywhere(structure: ModelStructure) -> tuple[dict[int, Stages], dict[int, str]]:
    """Two stages for each cut there is, and the reasons why there is none."""
    pairs, reasons = {}, {}
    for k in range(1, structure.num_layers):
        try:
            pairs[k] = cut(structure, [k])
        except CannotCut as error:
            reasons[k] = str(error)
    return pairs, reasons


def _by_turns(right: Sequence[int]) -> Iterator[list[int]]:
    """Every cut once: the first, the third and so on; then the others."""
    yield from (list(borders) for borders in (right[::2], right[1::2]) if borders)


def _each_alone(right: Sequence[int]) -> Iterator[list[int]]:
    yield from ([k] for k in right)
    if len(right) >= 2:
        yield [right[0], right[-1]]
    if len(right) >= 3:
        yield [right[len(right) // 2 - 1], right[len(right) // 2]]


def reference(model: nn.Module, num_decoded: int = NUM_DECODED) -> tuple[mx.array, mx.array]:
    """The tokens of prompt and greedy answer, and the logits of all of them, from plain mlx-lm."""
    tokens = (mx.arange(NUM_PROMPT) * 37 + 11)[None] % VOCAB
    cache = make_prompt_cache(model)
    logits = [_logits(model, tokens[:, at : at + CHUNK], cache) for at in range(0, NUM_PROMPT, CHUNK)]
    for _ in range(num_decoded):
        token = mx.argmax(logits[-1][:, -1:, :], axis=-1).astype(tokens.dtype)
        tokens = mx.concatenate([tokens, token], axis=1)
        logits.append(_logits(model, token, cache))
        mx.eval(tokens)
    expected = mx.concatenate(logits, axis=1)
    assert not mx.isnan(expected).any().item(), "the reference itself is not a number"
    return tokens, expected


def _logits(model: nn.Module, tokens: mx.array, cache: Any = None) -> mx.array:
    result = model(tokens, cache=cache)
    return cast(mx.array, getattr(result, "logits", result))


def _chunks(tokens: mx.array, chunk: int) -> Iterator[mx.array]:
    for at in range(0, NUM_PROMPT, chunk):
        yield tokens[:, at : min(at + chunk, NUM_PROMPT)]
    for at in range(NUM_PROMPT, tokens.shape[1]):
        yield tokens[:, at : at + 1]


def _forward(stages: Stages, caches: Sequence[SequenceCaches], tokens: mx.array, num_logits: int) -> mx.array:
    y: mx.array | None = None
    for stage, held in zip(stages, caches, strict=True):
        y = stage(tokens, held, y, num_logits)
    assert y is not None
    return y


def run(stages: Stages, tokens: mx.array, chunk: int) -> mx.array:
    caches = [stage.make_caches() for stage in stages]
    logits = [_forward(stages, caches, part, part.shape[1]) for part in _chunks(tokens, chunk)]
    return mx.concatenate(logits, axis=1)


def equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())


def difference(a: mx.array, b: mx.array) -> float:
    """The largest, in units of the largest logit; equal infinities do not differ."""
    scale = mx.where(mx.isinf(b), 0, mx.abs(b)).max()
    return float((mx.where(a == b, 0, mx.abs(a - b)).max() / scale).item())


def _check_whole(whole: Stages, tokens: mx.array, ours: mx.array, expected: mx.array) -> list[str]:
    windows = any(isinstance(c, WindowKVCache) for c in _leaves(whole[0]))
    if not windows:
        assert equal(ours, expected), "the whole model differs from mlx-lm's"
        return []
    off = difference(ours, expected)
    if off < TOLERANCE:
        return []
    cacheless = _logits(whole[0].whole, tokens)
    assert difference(ours, cacheless) < TOLERANCE, f"the whole model differs from mlx-lm's by {off}"
    return ["mlx-lm's own cache is shorter than the window of its mask; ours agrees with mlx-lm without a cache"]


def _leaves(stage: StageModel) -> list[Any]:
    return [c for cache in stage.make_caches().own for c in getattr(cache, "caches", [cache])]


def _rollback(whole: Stages) -> str:
    limit = least_rewind(rewind_limit(cache) for cache in whole[0].make_caches().own)
    if limit == WITHIN_DRAFTS:
        way = try_rollback(whole[0], StepModel(whole[0]))
        return "none" if way is None else _OF_STATES[way]
    return "any" if limit is None else "none" if limit == NEVER else f"{limit} tokens"


_OF_STATES = {Rollback.MODULES: "drafts", Rollback.STAGE: "drafts, layers again"}


def _together(stage: StageModel) -> str:
    """How the rows of many sequences are run; to the last bit what each has alone, or the way would be wrong."""
    step, found = StepModel(stage, exact=True), list[Errors]()
    errors = step_trial._Round.errors

    def noted(one: Any, run: step_trial.RunSteps) -> Errors:
        found.append(errors(one, run))
        return found[-1]

    with mock.patch.object(step_trial._Round, "errors", noted):  # the last is of the way that was chosen
        way = step.way
    if way is not Way.SEQUENCES:
        assert found[-1].values.max() == 0, f"{way}: rows of many sequences differ from those of each"
    return way.value


def _kept(stage: StageModel) -> str:
    """Where a sequence can go on that begins with what another computed."""
    if why_no_blocks(stage) is not None:
        return "no"
    limit = least_rewind(rewind_limit(cache) for cache in stage.make_caches().own)
    return "block ends" if limit in (WITHIN_DRAFTS, NEVER) else "anywhere"


def _check_rows(stages: Stages, whole: Stages, tokens: mx.array) -> None:
    """As an engine calls it: logits for the last row only, none while a prompt is not yet through."""
    kept, kept_whole = ([stage.make_caches() for stage in s] for s in (stages, whole))
    for num_logits, part in ((0, tokens[:, :9]), (1, tokens[:, 9:20]), (3, tokens[:, 20:30])):
        y, expected = _forward(stages, kept, part, num_logits), _forward(whole, kept_whole, part, num_logits)
        assert y.shape[1] == max(num_logits, 1)
        assert equal(y, expected), f"other logits than whole for the last {num_logits} rows"


def _check_rollback(stages: Stages, tokens: mx.array, straight: mx.array) -> None:
    """After a rollback the same rows have the same logits, up to rounding, as without one: a block of right rows and
    of mistaken ones goes back to the first mistake."""
    planned = Planned(stages)
    for pool, step in zip(planned.pools, planned.steps, strict=True):
        pool.rollback = try_rollback(pool._model, step) or pool.rollback
    planned.open(1)
    at = CHUNK + _RIGHT
    mistaken = (tokens[:, at : at + ROLLBACK] + 1) % VOCAB
    for start, rows in ((0, tokens[:, :CHUNK]), (CHUNK, mx.concatenate([tokens[:, CHUNK:at], mistaken], axis=1))):
        planned.run((1, start, rows[0].tolist(), start and _RIGHT + ROLLBACK))
    again = planned.run((1, at, tokens[0, at : 2 * CHUNK].tolist(), 0))
    off = difference(again[None], straight[:, at : 2 * CHUNK])
    assert off < TOLERANCE, f"after a rollback the logits differ by {off}"


def _check_reads(stages: Stages, structure: ModelStructure) -> None:
    """No stage reads a parameter of an earlier layer, nor of a later one but its first norm, or the Engram that the
    model itself calls in front of it."""
    parameters = dict(tree_flatten(structure.model.parameters()))
    for stage in stages:
        caches = stage.make_caches()
        outputs = [stage(mx.zeros((1, rows), mx.int32), caches, None, rows) for rows in (3, 1)]
        outputs += [a for cache in caches.own for _, a in tree_flatten(cache.state) if isinstance(a, mx.array)]
        (read,) = arrays_read(outputs, parameters)
        later = read & {name for name, owner in structure._owners.items() if owner >= stage.end}
        assert not read & structure.hidden_from(stage.start), "a stage reads parameters of earlier layers"
        wrong = sorted(name for name in later if parameters[name].ndim > 1 and ".engram." not in name)
        assert not wrong, f"a stage reads {wrong} of later layers"


def _notes(structure: ModelStructure, right: Sequence[int]) -> Iterator[str]:
    borders = {k: structure.border(k) for k in right}
    several = [k for k, border in borders.items() if len(border.rows) > 1]
    again = [k for k, border in borders.items() if border.replicas]
    sharing = [k for k, border in borders.items() if border.shared]
    if several:
        most = max(len(borders[k].rows) for k in several)
        yield f"up to {most} arrays cross at layers {_ranges(several)}"
    if again:
        sources = sorted({i for k in again for i in borders[k].replicas})
        yield f"layers {_ranges(sources)} run again behind cuts at {_ranges(again)}, as far as later ones read of them"
    if sharing:
        sources = sorted({structure.first_user(i) for k in sharing for i in borders[k].shared} - {None})
        yield f"keys and values of layers {_ranges(sources)} cross at layers {_ranges(sharing)}"


def _ranges(numbers: Sequence[Any]) -> str:
    return ", ".join(str(n) for n in numbers)
