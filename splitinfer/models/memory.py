"""What a stage needs, what the machine has, and MLX's limits.

On a Mac the GPU's share of the unified memory is the device's recommended working set; elsewhere it
is what the operating system calls available. Refusing before loading is kinder than swapping.
"""

from dataclasses import dataclass

import mlx.core as mx
import psutil

from splitinfer.errors import CannotFit

_MARGIN = 256 * 2**20  # activations, buffers and the interpreter


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a stage will hold: its weights as loaded, and KV for so many tokens."""

    weights: int
    kv_fixed: int
    kv_per_token: int
    kv_stored: int = 0  # a block kept for other sequences

    def total(self, kv_tokens: int) -> int:
        """Weights and the KV of ``kv_tokens`` tokens."""
        return self.weights + self.kv_fixed + self.kv_per_token * kv_tokens

    def sentence(self, kv_tokens: int, free: int) -> str:
        """For a person, before loading."""
        kv = self.total(kv_tokens) - self.weights
        return f"needs {size(self.weights)} of weights and {size(kv)} of KV for {kv_tokens:,} tokens; {size(free)} free"


def size(num_bytes: float) -> str:
    """A number of bytes for a person: three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 999.5:  # more is rounded to four digits
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes * 1000:,.0f} TB"


def on_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def free_bytes() -> int:
    """Bytes this process may still take for weights and KV."""
    available = int(psutil.virtual_memory().available)
    recommended = mx.device_info().get("max_recommended_working_set_size") if on_gpu() else None
    if not isinstance(recommended, int):
        return available
    return min(available, recommended - mx.get_active_memory())


_FEWER_LAYERS = "give it fewer layers, or a smaller --context"


def check_fit(need: Need, kv_tokens: int, who: str, remedy: str = _FEWER_LAYERS) -> int:
    """Refuse what cannot fit; return the free bytes.

    Raises:
        CannotFit: with the numbers.
    """
    free = free_bytes()
    if need.total(kv_tokens) + _MARGIN > free:
        short = size(need.total(kv_tokens) + _MARGIN - free)
        raise CannotFit(f"{who} does not fit: it {need.sentence(kv_tokens, free)}, {short} too little; {remedy}")
    return free


def set_limits(need: Need, kv_tokens: int) -> None:
    """Keep what a stage holds resident on a GPU, and MLX's cache of freed buffers small."""
    wanted = need.total(kv_tokens) + _MARGIN
    recommended = mx.device_info().get("max_recommended_working_set_size") if on_gpu() else None
    if isinstance(recommended, int):
        mx.set_wired_limit(recommended)  # KV grows into all of what is free
    mx.set_cache_limit(max(64 * 2**20, min(wanted // 8, 2 * 2**30)))
