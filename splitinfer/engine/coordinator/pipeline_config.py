"""What a pipeline is opened with: a layout, and what every stage is told to load."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.files.answering import Running
from splitinfer.engine.links.keys import Keys
from splitinfer.kvstore.store import Disk
from splitinfer.wire.messages import Load, Peer
from transports import address_for_others


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """What to open. ``first``: what the first stage loads; the others differ in their layers and their peers."""

    layout: Layout
    first: Load
    connect_timeout: float  # seconds to reach a worker
    keys: Keys  # for encrypted links
    disk: Disk | None = None  # where this machine stores KV
    running: tuple[Running, ...] = ()  # what workers may copy that lack weights
    find: Callable[[StageSpec], str | None] = lambda _spec: None  # where a worker's key announces itself now
    by_key: frozenset[str] = frozenset()  # the stages whose addresses were found so, not given

    def load(self, stage: int) -> Load:
        """What a stage is told to load."""
        stages = self.layout.stages
        others = [spec for at, spec in enumerate(stages) if at not in (0, stage) and not spec.is_local]
        return replace(
            self.first,
            stage=stage,
            bounds=(0, *(spec.end for spec in stages)),
            float32_head=self.layout.float32_head and stage == len(stages) - 1,
            peers=tuple(Peer(one.name, address_for_others(str(one.address)), one.key or "") for one in others),
            reader_keys=tuple(one.key for one in others if one.key),
        )
