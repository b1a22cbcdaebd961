"""Which models fit on which Macs: the table of ``docs/start/models.md``, by the memory formulas of ``plan``.

    python tests/placement/macs.py        prints the table

A Mac is taken to give its GPU three quarters of its memory. Layers are taken to be alike. A model's row comes from its
``config.json``: 4.5 bits for a weight (4 bits and, for 64 of them, a scale and a bias), keys and values in 16 bits.
"""

# ruff: noqa: T201

from collections.abc import Iterator

from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import LayerProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.memory import Memory

GPU_SHARE = 0.75
# name: GB of weights, layers, bytes of keys and values for a token, the model's own context
MODELS = {
    "Qwen3-8B": (4.6, 36, 147_456, 40_960),
    "Qwen3-30B-A3B": (17.2, 48, 98_304, 40_960),
    "Qwen3-32B": (18.4, 64, 262_144, 40_960),
    "Llama-3.3-70B": (39.7, 80, 327_680, 131_072),
    "GLM-4.5-Air": (60.2, 46, 188_416, 131_072),
    "Qwen3-235B-A22B": (132.3, 94, 192_512, 40_960),
}
# GB of routed experts, and of those that a token needs: from the sizes in ``config.json``
EXPERTS = {
    "Qwen3-30B-A3B": (16.3, 1.02),
    "GLM-4.5-Air": (56.1, 3.5),
    "Qwen3-235B-A22B": (127.7, 7.98),
    "DeepSeek-V3.1": (367.8, 11.5),
}
ALL = {**MODELS, "DeepSeek-V3.1": (377.4, 61, 70_272, 163_840)}
ON_DISK = ((16,), (16, 16), (32,), (64,), (64, 64), (128,), (128, 128), (192,), (192, 192))
RECIPES = {  # memory of the Macs: a model of mlx-community, its draft, and GB of the draft with 8,192 tokens of KV
    (16, 16): ("Qwen3-32B", "Qwen3-0.6B-4bit", 1.3),
    (32, 32): ("Llama-3.3-70B", "Llama-3.2-1B-Instruct-4bit", 1.0),
    (64, 32): ("GLM-4.5-Air", "ngram", 0.0),
    (128, 128): ("Qwen3-235B-A22B", "Qwen3-0.6B-4bit", 1.3),
}
MACS = (  # GiB of memory
    (16,), (16, 16), (24,), (24, 16), (32,), (32, 32), (36,), (48,), (48, 24), (64,), (64, 32), (64, 64), (96,),
    (128,), (128, 64), (128, 128), (192,),
)  # fmt: skip


def longest(name: str, macs: tuple[int, ...]) -> int:
    """Return the longest context that fits; 0 if the model does not fit."""
    return best(name, macs)[0]


def best(name: str, macs: tuple[int, ...], draft_gb: float = 0.0) -> tuple[int, tuple[int, ...]]:
    """Return the longest context over the cuts near the one by memory, and the layers of the most even cut with it.
    ``draft_gb``: what a draft model takes on the first machine."""
    fitted, count = _memory(name, macs, draft_gb), ALL[name][1]
    return max((fitted.longest(cut), -max(cut.layers) + min(cut.layers), cut.layers) for cut in _cuts(count, macs))[::2]


def on_disk(name: str, macs: tuple[int, ...]) -> str:
    """Return how many experts are in memory beside 8,192 tokens of KV, and the GB that each token reads."""
    fitted, (_, chosen) = _memory(name, macs, disk=1.0), EXPERTS[name]
    cuts = [cut for cut in _cuts(ALL[name][1], macs) if fitted.fits(cut, 8192, 1)]
    if not cuts:
        return "no"
    layers = [zip(fitted.in_memory(cut), cut.layers, strict=True) for cut in cuts]
    share = max(sum(share * count for share, count in each) for each in layers) / ALL[name][1]
    return "all" if share > 0.999 else f"{share:.0%}, {(1 - share) * chosen:.1f} GB"


def _memory(name: str, macs: tuple[int, ...], draft_gb: float = 0.0, disk: float = 0.0) -> Memory:
    gigabytes, count, per_token, context = ALL[name]
    experts, chosen = (int(1e9 * each / count) for each in EXPERTS.get(name, (0, 0)))
    layer = LayerProfile("layer", int(gigabytes * 1e9 / count), per_token // count, experts=experts, chosen=chosen)
    model = ModelProfile(name, (layer,) * count, context_length=context)
    machines = [
        MachineProfile(f"mac{i}", {"layer": Costs()}, f"tcp://mac{i}" if i else None, free_bytes=free, disk=disk)
        for i, free in enumerate((_gpu(macs[0]) - int(draft_gb * 1e9), *map(_gpu, macs[1:])))
    ]
    return Memory(Profiles(model, machines), Asked())


def _gpu(memory: int) -> int:
    return int(GPU_SHARE * memory * 2**30)


def _cuts(count: int, macs: tuple[int, ...]) -> Iterator[Cut]:
    if len(macs) == 1:
        yield Cut((0,), (count,))
        return
    middle = round(count * macs[0] / sum(macs))
    for first in range(max(1, middle - 3), min(count, middle + 4)):
        yield Cut((0, 1), (first, count - first))


def cell(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 4096 else "no"


def rows() -> list[str]:
    return [
        f"| {' + '.join(str(memory) for memory in macs)} | {' | '.join(cell(longest(name, macs)) for name in MODELS)} |"
        for macs in MACS
    ]


def rows_on_disk() -> list[str]:
    return [
        f"| {' + '.join(str(memory) for memory in macs)} | {' | '.join(on_disk(name, macs) for name in EXPERTS)} |"
        for macs in ON_DISK
    ]


if __name__ == "__main__":
    print("\n".join([*rows(), "", *rows_on_disk()]))
