"""Compares the memory a stage needs with what the machine has free, and sets MLX's limits.

On a Mac the GPU's share of the unified memory is the device's recommended working set; elsewhere the limit
is what the operating system calls available. A stage that does not fit is refused before it is loaded, so that the
machine does not swap.
"""

from dataclasses import dataclass

import mlx.core as mx
import psutil

from splitinfer.core.kv.growth import spare
from splitinfer.errors import CannotFit

_MARGIN = 256 * 2**20  # activations, buffers and the interpreter


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a stage will hold: its weights as loaded, and KV by the number of tokens."""

    weights: int
    kv_fixed: int  # states and full sliding windows
    kv_per_token: int
    kv_stored: int = 0  # of one stored block

    def total(self, kv_tokens: int) -> int:
        """Weights and the KV of ``kv_tokens`` tokens, with the room that it may grow into."""
        return self.weights + self.kv_fixed + self.kv_per_token * (kv_tokens + spare(kv_tokens))

    def sentence(self, kv_tokens: int, free: int) -> str:
        """What is needed and what is free, as part of a message."""
        kv = self.total(kv_tokens) - self.weights
        return f"needs {size(self.weights)} of weights and {size(kv)} of KV for {kv_tokens:,} tokens; {size(free)} free"


def size(num_bytes: float) -> str:
    """A number of bytes as text: three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 999.5:  # more is rounded to four digits
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes * 1000:,.0f} TB"


def on_gpu() -> bool:
    """Whether MLX's default device is a GPU."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def free_bytes() -> int:
    """Bytes this process may still take for weights and KV."""
    available = int(psutil.virtual_memory().available)
    recommended = mx.device_info().get("max_recommended_working_set_size") if on_gpu() else None
    if not isinstance(recommended, int):
        return available
    return min(available, recommended - mx.get_active_memory())


_FEWER_LAYERS = "give it fewer layers, or a smaller --context"


def resource_limit() -> int | None:
    """The number of buffers that a process may have on the GPU; ``None`` where MLX knows of no limit."""
    limit = mx.device_info().get("resource_limit") if on_gpu() else None
    return limit if isinstance(limit, int) and limit > 0 else None


def counted_bytes(kv_stored: int, num_arrays: int, free: int, limit: int | None) -> int:
    """The bytes that a stored block of ``kv_stored`` bytes and ``num_arrays`` arrays counts as.

    Where its arrays are scarcer than its bytes it counts as more than it takes: so much that blocks for all of the free
    bytes have at most half of ``limit`` buffers. The other half is for weights, running sequences and steps.

    >>> [counted_bytes(1000, 40, 10**6, limit) for limit in (None, 499_000, 800)]
    [1000, 1000, 100000]
    """
    if limit is None or not num_arrays:
        return kv_stored
    return max(kv_stored, -(-free // max(1, limit // 2 // num_arrays)))


def check_fit(need: Need, kv_tokens: int, name: str, remedy: str = _FEWER_LAYERS) -> int:
    """The free bytes, if ``need`` fits into them. ``name``: what needs it, in the message.

    Raises:
        CannotFit: it does not fit; the message has the numbers and the ``remedy``.
    """
    free = free_bytes()
    if need.total(kv_tokens) + _MARGIN > free:
        short = size(need.total(kv_tokens) + _MARGIN - free)
        raise CannotFit(f"{name} does not fit: it {need.sentence(kv_tokens, free)}, {short} too little; {remedy}")
    return free


def set_limits(need: Need, kv_tokens: int) -> None:
    """Keep what a stage holds resident on a GPU, and MLX's cache of freed buffers small."""
    wanted = need.total(kv_tokens) + _MARGIN
    recommended = mx.device_info().get("max_recommended_working_set_size") if on_gpu() else None
    if isinstance(recommended, int):
        mx.set_wired_limit(recommended)  # KV may grow into all free memory
    mx.set_cache_limit(max(64 * 2**20, min(wanted // 8, 2 * 2**30)))
