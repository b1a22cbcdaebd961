"""Makes the engine's parts from a layout, a model and settings: the pipeline, the scheduler's config, the drafter.

Only the drafter is loaded here, on the engine's thread; the rest is arithmetic on the stages' Ready messages.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.common.plain_text import size
from splitinfer.config import Layout, find_layout
from splitinfer.core.codecs import NONE
from splitinfer.core.kv.block_tree import KEY_BYTES, Key
from splitinfer.core.kv.budget import BLOCK, KVBudget, StageKV
from splitinfer.core.kv.prefix_cache import WORTH, PrefixCacheConfig
from splitinfer.core.kv.rewind import NEVER, UNLIMITED, WITHIN_DRAFTS
from splitinfer.core.layout import Layout as PlainLayout
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.serving_options import MAX_RUNNING, ServingOptions, usual_token_budget
from splitinfer.discovery.discover import find_again
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.engine.drafts.drafters import (
    WITH_NGRAMS,
    Drafter,
    ModelWithNGrams,
    NGramDrafter,
    dtype_in,
    has_heads,
    model_in,
)
from splitinfer.engine.fleet.fleet import Notice as Notice
from splitinfer.engine.fleet.pipeline import Pipeline, PipelineConfig
from splitinfer.engine.versions import own_versions
from splitinfer.errors import ConfigError, LayoutError, ModelError
from splitinfer.keyring import Keyring
from splitinfer.llm.prompts import tokenizer_of
from splitinfer.llm.seeing import may_see
from splitinfer.models.drafters.mtp import MTP
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.folder.hub import open_model
from splitinfer.models.load.building import mlx_vlm_of
from splitinfer.models.load.halves import check_halves
from splitinfer.models.load.trained import at_once, is_trained
from splitinfer.models.memory import KV_SHARE
from splitinfer.settings import NO_DRAFT, Settings
from splitinfer.text.tokenizer import Tokenizer
from splitinfer.wire.messages import Load, Progress, Ready

log = logging.getLogger(__name__)

MakeDrafter = Callable[[], Drafter]

DRAFT = "draft"  # in place of a stage's name, for the draft model


@dataclass(frozen=True)
class PipelineSetup:
    """What an engine is made from. ``vocab_size``: the number of tokens that may be sampled; ``context_length``: tokens
    of a prompt and its answer together that every stage must have room for. ``make_drafter``: makes another drafter
    than the layout's. ``by_key``: the stages whose addresses were found."""

    layout: PlainLayout
    settings: Settings
    serving_options: ServingOptions
    checkpoint: Checkpoint
    vocab_size: int
    context_length: int
    make_drafter: MakeDrafter | None = None
    by_key: frozenset[str] = frozenset()

    @property
    def pipeline(self) -> PipelineConfig:
        """What the pipeline is opened with."""
        layout, trained, model = self.layout, self._trained, _absolute(model_of(self.layout))
        running = [(self.checkpoint, model)] + ([] if trained is None else [(trained, self._drafter_at_end)])
        return PipelineConfig(
            layout,
            Load(
                model=model,
                dtype=layout.dtype,
                stage=0,
                bounds=(0, layout.num_layers),
                fingerprint=self.fingerprint,
                vocab_size=self.vocab_size,
                kv_tokens=min(self.context_length, self._most_context),
                max_tokens=self._most_context,
                kv_root=self._kv_root if self.settings.disk is not None else b"",
                kv_format=layout.kv_format,
                float32_head=False,
                drafter=self._drafter_at_end,
                drafter_dtype=dtype_in(str(layout.draft), layout.dtype) if self._drafter_at_end else "",
                drafter_fingerprint=None if trained is None else trained.fingerprint(),
                sees=self.sees,
                mlx_vlm=mlx_vlm_of(self.checkpoint, sees=self.sees),
            ),
            connect_timeout=self.settings.connect_timeout,
            keys=Keyring(),  # made when a link needs it: another cut may bring workers that have keys
            disk=self.settings.disk,
            running=tuple(running),
            find=find_again,
            by_key=self.by_key,
            insecure_sums=self.settings.insecure_sums,
        )

    def scheduler_config(self, pipeline: Pipeline) -> SchedulerConfig:
        """Return the scheduler's config, once the stages are loaded.

        Raises:
            ModelError: there is a drafter, and the model cannot be rewound to where a draft was wrong.
            ConfigError: ``kv_bytes`` holds no request on one of the stages.
        """
        stages, settings = pipeline.layout.num_stages, self.settings
        kv = KVBudget(tuple(self._stage_kv(ready, pipeline) for ready in pipeline.ready), BLOCK)
        if self.settings.kv_bytes is not None:
            _check_kv_bytes(kv, pipeline)
        groups = settings.micro_batches or stages
        return SchedulerConfig(
            num_groups=groups,
            max_in_flight=max(stages + 1, groups),
            token_budget=token_budget_of(self.serving_options, (ready.device for ready in pipeline.ready)),
            max_running=self.serving_options.max_running or MAX_RUNNING,
            max_len=kv.longest(self._most_context) if self.settings.context is None else self.context_length,
            max_waiting=settings.max_waiting,
            kv=kv,
            blocks=PrefixCacheConfig(
                keeps_blocks=settings.prefix_cache and all(ready.keeps_blocks for ready in pipeline.ready),
                whole_blocks=pipeline.rewind is not UNLIMITED and pipeline.rewind <= WITHIN_DRAFTS,
                prompts_only=_packs(pipeline),
                root=self._root_of(pipeline),
                on_disk=pipeline.is_on_disk,
                kept=pipeline.kept(),
                worth=WORTH,
            ),
            speculates=self._speculates(pipeline),
            drafts_at_end=bool(self._drafter_at_end) and pipeline.drafts,
            with_ngrams=bool(self._drafter_at_end) and pipeline.drafts and str(self.layout.draft).endswith(WITH_NGRAMS),
            drafts_at_once=0 if self._trained is None else at_once(self._trained),
            jumps_forward=pipeline.rewind != NEVER,
            num_stages=stages,
            rewind=pipeline.rewind,
            policy_config=self.serving_options.policy_config,
            fixed_groups=settings.micro_batches is not None,
        )

    def drafter(self, report: Callable[[Progress], None]) -> Drafter | None:
        """Load the layout's drafter; ``None`` if it has none. Call on the engine's thread."""
        name = self.layout.draft
        if self.make_drafter is not None:
            return self.make_drafter()
        if name is None or self._drafter_at_end:
            return None
        small = model_in(name)
        if small is None:
            return NGramDrafter()
        checkpoint, vocab_size = open_model(small), self.vocab_size
        dtype = dtype_in(name, self.layout.dtype)
        model = DraftModel.load(small, checkpoint, dtype, vocab_size, self.context_length, report)
        return ModelWithNGrams(model) if name.endswith(WITH_NGRAMS) else model

    def _speculates(self, pipeline: Pipeline) -> bool:
        if self.layout.draft is None and self.make_drafter is None:
            return False
        if self._drafter_at_end and not pipeline.drafts:
            return False
        if pipeline.rewind == NEVER:
            raise ModelError(
                f"draft {self.layout.draft} cannot be used with {self.layout.model}: its layers keep a state that "
                "cannot be rolled back after a wrong draft; run without drafts (--draft none)"
            )
        return True

    @cached_property
    def sees(self) -> bool:
        """Whether the model is loaded with its tower for pictures."""
        return may_see(self.checkpoint, self.settings.pictures, self.layout.stages[0].end)

    @cached_property
    def _most_context(self) -> int:
        """The context length where memory is no bound. A draft model is not asked beyond its own."""
        small = None if self.layout.draft is None or self._trained is not None else model_in(self.layout.draft)
        drafting = open_model(small).context_length if small is not None and self.settings.grows_context else None
        return self.settings.most_context_of(self.checkpoint.context_length, drafting)

    @cached_property
    def _trained(self) -> Checkpoint | None:
        """The layout's drafter, if it has a folder of its own and runs on the last stage."""
        return None if self.make_drafter is not None else trained_drafter(self.layout.draft)

    @property
    def _drafter_at_end(self) -> str:
        """What stages are told of a drafter on the last stage; empty without one."""
        if self._trained is not None:
            return _absolute(str(model_in(str(self.layout.draft))))
        return MTP if has_heads(self.layout.draft) and self.make_drafter is None else ""

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What identifies the weights; computed once, because it reads files."""
        return self.checkpoint.fingerprint()

    @cached_property
    def _kv_root(self) -> Key:
        """The root of the blocks' keys: a hash of everything that the KV of all stages depends on. What depends on one
        stage's machine is in the name of its group of files."""
        v = own_versions()
        layout, weights = self.layout, self.fingerprint.digest()
        inputs = (weights, layout.dtype, layout.kv_format, BLOCK, v.splitinfer, v.mlx, v.mlx_lm)
        heads = "" if self._trained is None else str(self._trained.fingerprint().digest())
        heads += MTP if has_heads(layout.draft) else ""  # whose KV is kept with the last stage's
        heads += dtype_in(str(layout.draft), "") if heads else ""
        heads += "sees" if self.sees else ""  # computed by another class
        return hashlib.blake2b((repr(inputs) + heads).encode(), digest_size=KEY_BYTES).digest()

    def _root_of(self, pipeline: Pipeline) -> Key:
        """Return the same root with the links' codecs: blocks on disk whose prompts crossed by another codec are not
        found."""
        if not _packs(pipeline):
            return self._kv_root
        return hashlib.blake2b(self._kv_root + repr(pipeline.codecs).encode(), digest_size=KEY_BYTES).digest()

    def _stage_kv(self, ready: Ready, pipeline: Pipeline) -> StageKV:
        """Return a stage's memory for KV in bytes, by default a share of the free memory of its machine."""
        here = pipeline.layout.here
        is_here = any(rank in here for rank in pipeline.layout.stages[ready.stage].ranks)
        sharing = len(here) * self.settings.models_here if is_here else 1
        budget = self.settings.kv_bytes
        if budget is None:
            budget = int(ready.free_bytes * KV_SHARE / sharing)
        return StageKV(budget, ready.kv_bytes_per_token, ready.kv_bytes_fixed, ready.kv_bytes_stored)


def _check_kv_bytes(kv: KVBudget, pipeline: Pipeline) -> None:
    """Compare the KV memory in the settings with the need of requests, and with the free memory.

    Raises:
        ConfigError: no request fits on one of the stages.
    """
    for ready, there in zip(pipeline.ready, kv.stages, strict=True):
        name, asked = pipeline.layout.stages[ready.stage].name, f"--kv-gb {there.budget_bytes / 1e9:g}"
        least = there.bytes_of(kv.use_of(1))
        if there.budget_bytes < least:
            held = max(0, there.budget_bytes - there.fixed) // max(1, there.per_token)
            raise ConfigError(
                f"{asked} holds {held} tokens on stage {name}, and every request takes room for {BLOCK}; "
                f"give at least --kv-gb {1.1 * least / 1e9:.2g}"
            )
        if there.budget_bytes > ready.free_bytes:
            log.warning("%s is more than the %s that are free on stage %s", asked, size(ready.free_bytes), name)


def _packs(pipeline: Pipeline) -> bool:
    """Return whether any link packs hidden states."""
    return any(codec != NONE for codec in pipeline.codecs)


def token_budget_of(serving_options: ServingOptions, devices: Iterable[str]) -> int:
    """Return the most tokens in one step."""
    return serving_options.token_budget or usual_token_budget(on_gpu=any(device != "cpu" for device in devices))


def as_layout(layout: PlainLayout | Mapping[str, Any] | str | Path, model: str | None) -> PlainLayout:
    """Return a layout from any of its forms; ``model`` replaces the one it names.

    Raises:
        LayoutError: there is no such layout, or it cannot be used.
    """
    if isinstance(layout, str | Path):
        layout = find_layout(str(layout))
    elif isinstance(layout, Mapping):
        layout = Layout.from_dict(layout)
    return layout if model is None else layout.with_model(model)


def model_of(layout: PlainLayout) -> str:
    """Return the model of a layout.

    Raises:
        LayoutError: it names none.
    """
    if layout.model is None:
        raise LayoutError(f"layout {layout.name} names no model; give one with --model (or LLM(..., model=...))")
    return layout.model


def _absolute(model: str) -> str:
    """Return a local folder's absolute path, because local workers may run in another folder; other names unchanged."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def with_settings(layout: PlainLayout, settings: Settings) -> PlainLayout:
    """Return the layout with the draft, KV format, head, experts and codec of the settings, where they have one."""
    if settings.draft is not None:
        layout = replace(layout, draft=None if settings.draft == NO_DRAFT else settings.draft)
    if settings.kv_format is not None:
        layout = replace(layout, kv_format=settings.kv_format)
    if settings.float32_head is not None:
        layout = replace(layout, float32_head=settings.float32_head)
    if settings.experts_gb is not None:
        layout = layout.with_experts(settings.experts_gb)
    return layout if settings.codec is None else layout.with_codec(settings.codec)


def with_layers(layout: PlainLayout, layers: Sequence[int]) -> PlainLayout:
    """Return the layout with other numbers of layers for its stages.

    Raises:
        LayoutError: there are more or fewer numbers than stages, or a stage gets no layer.
    """
    if len(layers) != layout.num_stages:
        cut = "-".join(map(str, layers))
        raise LayoutError(f"the cut {cut} is for {len(layers)} stages; layout {layout.name} has {layout.num_stages}")
    ends = list(accumulate(layers))
    stages = zip(layout.stages, (0, *ends), ends, strict=False)
    return replace(layout, stages=tuple(replace(stage, start=start, end=end) for stage, start, end in stages))


def check_ranks(layout: PlainLayout, checkpoint: Checkpoint, pictures: bool | None) -> None:
    """Raise ModelError if a stage is across two machines, and the model cannot be halved. ``pictures``: as in
    ``Settings``."""
    if any(stage.across for stage in layout.stages):
        check_halves(checkpoint, sees=may_see(checkpoint, pictures, layout.stages[0].end))


def trained_drafter(draft: str | None) -> Checkpoint | None:
    """Return the checkpoint of a layout's ``draft``, if it was trained on the hidden states of its target.

    Raises:
        ModelError: there is no such model.
    """
    name = None if draft is None else model_in(draft)
    found = None if name is None else open_model(name)
    return found if found is not None and is_trained(found) else None


def check_draft(layout: PlainLayout, tokenizer: Tokenizer | None) -> None:
    """Check that the draft model has the model's vocabulary.

    Raises:
        LayoutError: it has another one, or there is no draft model where one is named.
    """
    name = None if layout.draft is None else model_in(layout.draft)
    if name is None or trained_drafter(layout.draft) is not None:
        return
    draft = open_model(name)
    own = tokenizer_of(draft)
    if own is None or tokenizer is None or own.vocabulary_hash != tokenizer.vocabulary_hash:
        draft_size, model_size = own.vocab_size if own else "no", tokenizer.vocab_size if tokenizer else "none"
        sizes = f"{draft_size} tokens, not the model's {model_size}"
        raise LayoutError(
            f"draft {name} does not have the vocabulary of {layout.model} ({sizes}); choose one of its family"
        )
