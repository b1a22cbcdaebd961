"""The simulator with toys in it: what the scheduler plans is carried out, on every stage, and the last one's answers
count."""

from toy import VOCAB, ToyStage, alone, config_of, next_token

from splitinfer.core.plan import SampledSlice, Slice, StepPlan
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.speculation import Proposal
from splitinfer.machine.costs import Costs
from tests.emulation.machine import Hop, Machine
from tests.sim.simulator import Simulator


def config(num_stages: int, **more: object) -> SchedulerConfig:
    limits = {"num_groups": num_stages, "max_in_flight": num_stages + 1, "num_stages": num_stages, "max_len": 100_000}
    return config_of(**{**limits, **more})  # type: ignore[arg-type]


def sequence(seq_id: int, prompt: int, answer: int, **more: object) -> Sequence:
    tokens = [(seq_id * 7 + i) % 5 for i in range(prompt)]
    return Sequence(seq_id, tokens, SamplingParams(max_tokens=answer), 0, **more)  # type: ignore[arg-type]


Stage = tuple[float, float, float]  # seconds for each step, for each of its tokens, and to whoever comes next


class PipelineSim(Simulator):
    """``times`` and ``tokens`` of each sequence."""

    def __init__(
        self, config: SchedulerConfig, stages: list[Stage], check: bool = True, draft: float = 0.0, **more: object
    ) -> None:
        machine = Machine(
            tuple(Costs.line(base, per_token) for base, per_token, _ in stages),
            tuple(Hop(link) for _, _, link in stages),
            (1,) * len(stages),
            draft=draft,
        )
        super().__init__(Scheduler(config), machine, check=check, **more)  # type: ignore[arg-type]
        self.toys = [ToyStage(whole_blocks=config.blocks.whole_blocks) for _ in stages]
        self.tokens: dict[int, list[int]] = {}

    def duty(self, start: float, end: float) -> list[float]:
        """The share of [start, end) in which each stage computed."""
        return [sum(max(0.0, min(end, e) - max(start, s)) for s, e in spans) / (end - start) for spans in self.busy]

    def submit(self, time: float, seq: Sequence) -> None:
        self.tokens[seq.seq_id] = []
        super().submit(time, seq)

    def carried_out(self, stage: int, plan: StepPlan) -> None:
        if stage + 1 < len(self.toys):
            self.toys[stage].run(plan)

    def sampled(self, plan: StepPlan) -> tuple[tuple[SampledSlice, ...], tuple[Slice, ...]]:
        return self.toys[-1].run(plan).sampled, plan.slices

    def guess(self, proposal: Proposal) -> int:
        seq = proposal.seq
        stream = [
            *[*seq.tokens, *seq.drafts.ahead][: proposal.position],
            *(draft.token_id for draft in proposal.drafts),
        ]
        return (next_token(stream, seq.seed) + (not self.is_right(proposal))) % VOCAB

    def got(self, seq_id: int, token_id: int) -> None:
        self.tokens[seq_id].append(token_id)

    def check_tokens(self, prompts: dict[int, list[int]], sequences: dict[int, Sequence]) -> None:
        """Each has the tokens that it gets alone, up to where it was aborted, and nothing is left of it."""
        for seq_id, tokens in self.tokens.items():
            wanted, reason = alone(sequences[seq_id], prompts[seq_id], self.scheduler.config.max_len)
            assert tokens == wanted[: len(tokens)]
            if sequences[seq_id].finish_reason is not FinishReason.ABORT:
                assert (tokens, sequences[seq_id].finish_reason) == (wanted, reason)
        stored = {block.block_id for block in self.scheduler.prefix_cache.tree}
        assert all(not toy.caches and set(toy.blocks) == stored for toy in self.toys), "KV that belongs to nobody"
