"""What a pipeline is opened with: a layout, and what every stage is told to load."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.files.answering import Running
from splitinfer.engine.links.keys import Keys
from splitinfer.kvstore.store import Disk
from splitinfer.wire.messages import Half, Load, Peer
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
    insecure_sums: bool = False  # whether the sums of two ranks may cross any network

    def load(self, stage: int, half: Half | None = None) -> Load:
        """What a stage is told to load, or a rank of it to load its half of."""
        stages = self.layout.stages
        return replace(
            self.first,
            stage=stage,
            bounds=(0, *(spec.end for spec in stages)),
            float32_head=self.layout.float32_head and stage == len(stages) - 1,
            peers=tuple(self._peers(stage)),
            reader_keys=tuple(peer.key for peer in self._peers(stage) if peer.key),
            half=half,
        )

    def _peers(self, stage: int) -> Iterator[Peer]:
        """The workers of the other stages, on other machines."""
        for at, spec in enumerate(self.layout.stages):
            for one in spec.ranks if at != stage else ():
                if one.address is not None and not one.is_local:
                    yield Peer(one.name, address_for_others(one.address), one.key or "")
