"""What a pipeline is opened with: a layout, and what every stage is told to load."""

from collections.abc import Callable
from dataclasses import dataclass

from splitinfer.core.fingerprint import Fingerprint
from splitinfer.core.kv.block_tree import Key
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.links.keys import Keys
from splitinfer.kvstore.store import Disk
from splitinfer.models.building import mlx_vlm_of
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.wire.messages import Load, Peer
from transports import address_for_others


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """What to open: the layout, and what every stage needs to know."""

    layout: Layout
    model: str
    fingerprint: Fingerprint
    vocab_size: int
    kv_tokens: int  # that every stage must have room for
    connect_timeout: float  # seconds to reach a worker
    disk: Disk | None = None  # where this machine stores KV
    kv_root: Key = b""  # what the keys of KV on disk begin with
    keys: Keys | None = None  # for encrypted links
    max_tokens: int = 0  # of a sequence, if there turns out to be room for more than ``kv_tokens``
    checkpoint: Checkpoint | None = None  # the model's, for workers that lack weights
    drafter: str = ""  # on the last stage
    drafter_fingerprint: Fingerprint | None = None
    sees: bool = False  # with the model's tower for pictures
    trained: Checkpoint | None = None  # the drafter's, if it has a folder of its own
    find: Callable[[StageSpec], str | None] = lambda _spec: None  # where a worker's key announces itself now
    by_key: frozenset[str] = frozenset()  # the stages whose addresses were found so, not given

    def load(self, stage: int) -> Load:
        """What a stage is told to load."""
        stages = self.layout.stages
        return Load(
            model=self.model,
            dtype=self.layout.dtype,
            stage=stage,
            bounds=(0, *(spec.end for spec in stages)),
            fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            kv_tokens=self.kv_tokens,
            max_tokens=self.max_tokens,
            kv_root=self.kv_root,
            kv_format=self.layout.kv_format,
            peers=self._others(stage),
            reader_keys=tuple(peer.key for peer in self._others(stage) if peer.key),
            float32_head=self.layout.float32_head and stage == self.layout.num_stages - 1,
            drafter=self.drafter,
            drafter_fingerprint=self.drafter_fingerprint,
            sees=self.sees,
            mlx_vlm="" if self.checkpoint is None else mlx_vlm_of(self.checkpoint, sees=self.sees),
        )

    def _others(self, stage: int) -> tuple[Peer, ...]:
        """The other workers, on whose machines there may be weights that this one lacks."""
        specs = [spec for at, spec in enumerate(self.layout.stages) if at not in (0, stage)]
        return tuple(
            Peer(spec.name, address_for_others(spec.address), spec.key or "")
            for spec in specs
            if spec.address is not None and not spec.is_local
        )
