"""Compares the memory a stage needs with what the machine has free, and sets MLX's limits.

Free memory is the memory that the operating system can give, minus the claims that other processes of this machine have
announced (``system.ledger``). On a Mac's GPU it is at most the recommended working set; on CUDA it is the free memory
of the GPU itself. A stage that does not fit is refused before it is loaded.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil

import mlx.core as mx

from splitinfer.common.plain_text import size
from splitinfer.core.kv.budget import KV_SHARE as KV_SHARE
from splitinfer.core.kv.budget import STAGE_MARGIN
from splitinfer.core.kv.growth import spare
from splitinfer.errors import CannotFit
from splitinfer.system import ledger
from splitinfer.system.free_memory import available_bytes, wired_limit_bytes
from splitinfer.system.ledger import left_over

_REPORT_EVERY, _WORTH_REPORTING = 2.0, 64 * 2**20  # seconds, bytes


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that a stage will hold: its weights as loaded, and its KV."""

    weights: int
    kv_fixed: int  # states and full sliding windows
    kv_per_token: int
    kv_stored: int = 0  # of one stored block
    scores: int = 0  # for attention that is not fused, in addition (``models.caches.attention``)

    def total(self, kv_tokens: int) -> int:
        """Return the bytes of the weights and of the KV of ``kv_tokens`` tokens, including room to grow."""
        return self.weights + self.kv_fixed + self.kv_per_token * (kv_tokens + spare(kv_tokens))

    def in_all(self, kv_tokens: int) -> int:
        """Return the bytes of ``total`` and of the ``scores``, with the margin for all else."""
        return self.total(kv_tokens) + STAGE_MARGIN + self.scores

    def sentence(self, kv_tokens: int, free: int) -> str:
        """Return the bytes needed and free, as part of a message."""
        kv = f"{size(self.total(kv_tokens) - self.weights)} of KV for {kv_tokens:,} tokens"
        if self.scores:
            kv = f"{kv} and {size(self.scores)} for their attention"
        return f"needs {size(self.weights)} of weights and {kv}; {size(free)} free"

    def warning(self, kv_tokens: int, free: int) -> str:
        """Return the ``sentence`` if the stage needs more than half of the ``free`` bytes, else an empty text."""
        return self.sentence(kv_tokens, free) if 2 * (self.total(kv_tokens) + self.scores) > free else ""


def on_gpu() -> bool:
    """Return whether MLX's default device is a GPU."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def free_bytes(patience: float | None = None) -> int:
    """Return the bytes that this process may still take for weights and KV. ``patience``: seconds to spend on reading
    other processes' claims; ``None``: the default."""
    others = ledger.of_this_process().others(patience)
    available, limit = own_memory_of_gpu() or (available_bytes(), gpu_limit())
    return left_over(available, limit, mx.get_active_memory(), others)


def unloaded_bytes() -> int:
    """Return the bytes that this process could take for weights and KV if it freed all of its arrays."""
    return free_bytes() + mx.get_active_memory()


def own_memory_of_gpu() -> tuple[int, int] | None:
    """Return the free and total bytes of a GPU with its own memory (MLX on CUDA). Return None on other devices."""
    info = mx.device_info() if on_gpu() else {}
    free, total = info.get("free_memory"), info.get("total_memory")
    return (free, total) if isinstance(free, int) and isinstance(total, int) else None


def gpu_limit() -> int | None:
    """Return the bytes that the GPU may hold for all processes, or ``None`` without a limit
    (``system.free_memory``)."""
    recommended = mx.device_info().get("max_recommended_working_set_size") if on_gpu() else None
    if not isinstance(recommended, int):
        return None
    return min(recommended, wired_limit_bytes() or recommended)


_FEWER_LAYERS = "give it fewer layers, and another machine the rest, or a smaller --context"


def resource_limit() -> int | None:
    """Return the number of buffers that a process may have on the GPU. Return None if MLX has no limit."""
    limit = mx.device_info().get("resource_limit") if on_gpu() else None
    return limit if isinstance(limit, int) and limit > 0 else None


def counted_bytes(kv_stored: int, num_arrays: int, free: int, limit: int | None) -> int:
    """Return the bytes to count for a stored block of ``kv_stored`` bytes in ``num_arrays`` arrays.

    If buffers are scarcer than bytes, a block counts as more than it takes, so that blocks for all free bytes have at
    most half of ``limit`` buffers. The other half is for weights, running sequences and steps.

    >>> [counted_bytes(1000, 40, 10**6, limit) for limit in (None, 499_000, 800)]
    [1000, 1000, 100000]
    """
    if limit is None or not num_arrays:
        return kv_stored
    return max(kv_stored, -(-free // max(1, limit // 2 // num_arrays)))


def check_fit(need: Need, kv_tokens: int, name: str, remedy: str = _FEWER_LAYERS) -> int:
    """Return the free bytes if ``need`` fits into them. ``name``: the stage's name in the message.

    Raises:
        CannotFit: it does not fit; the message has the numbers and the ``remedy``.
    """
    free, needed = free_bytes(), need.in_all(kv_tokens)
    if needed > free:
        sentence = need.sentence(kv_tokens, free)
        raise CannotFit(f"{name} does not fit: it {sentence}, {size(needed - free)} too little; {remedy}")
    return free


def experts_room(need: Need, kv_tokens: int, experts: int) -> int:
    """Return the bytes that are free for a stage's experts beside the KV of ``kv_tokens`` tokens, which gets its usual
    share of the free memory. ``experts``: the bytes of all experts, which ``need`` includes."""
    kv = need.total(kv_tokens) - need.weights
    beside = max(need.in_all(kv_tokens) - need.weights, ceil(kv / KV_SHARE))
    return free_bytes() - beside - (need.weights - experts)


def set_limits(need: Need, kv_tokens: int) -> None:
    """Keep a stage's memory resident on a GPU, and limit MLX's cache of freed buffers. The cache stays large enough for
    the scores, whose buffers the next layer uses again."""
    wanted = need.total(kv_tokens) + STAGE_MARGIN
    limit = gpu_limit()
    if limit is not None:
        mx.set_wired_limit(limit)  # KV may grow into all free memory
    mx.set_cache_limit(max(64 * 2**20, need.scores, min(wanted // 8, 2 * 2**30)))


def limit_to(free: int) -> None:
    """Make MLX wait for steps under way before it holds over ``free`` bytes more than now, if the GPU has a
    ``gpu_limit``. Command buffers keep the memory that they use (scores, too) until they are done, so layers launched
    ahead add up. MLX's own limit is 1.5 times the recommended working set."""
    if gpu_limit() is not None:
        mx.set_memory_limit(mx.get_active_memory() + free)


# -- announcements to other processes of this machine ------------------------------------------


def reserve(need: Need, kv_tokens: int, what: str, part: Hashable) -> int:
    """Return the free bytes if ``need`` fits (``check_fit``), and claim it, in one hold of the lock: two processes
    never see the same bytes as free. ``part``: identifies a stage of this process.

    Raises:
        CannotFit: it does not fit.
    """
    own = ledger.of_this_process()
    with own.locked():
        free = check_fit(need, kv_tokens, what)
        own.claim(part, held=mx.get_active_memory(), load=need.in_all(kv_tokens))
    return free


def announce_loaded(need: Need, kv_tokens: int, part: Hashable) -> int:
    """Return the bytes that a loaded stage may take in addition, and claim the share of them that its KV may reach.
    Both happen in one hold of the lock, so the claim does not include bytes that others have claimed."""
    own = ledger.of_this_process()
    with own.locked():
        free, load = free_bytes(), need.in_all(kv_tokens) - need.weights
        own.claim(part, held=mx.get_active_memory(), load=load, growth=int(free * KV_SHARE))
    return free


class HeldReport:
    """Reports to other processes how much memory this one holds, when that changes."""

    def __init__(self) -> None:
        self._next, self._held = 0.0, 0

    def update(self, now: float) -> None:
        """Report the bytes held if they have changed enough, at most every two seconds. ``now``: in seconds."""
        if now < self._next:
            return
        self._next, held = now + _REPORT_EVERY, mx.get_active_memory()
        if abs(held - self._held) >= _WORTH_REPORTING:
            self.now(held)

    def now(self, held: int | None = None) -> None:
        """Report the bytes held at once. ``held``: the bytes; ``None``: MLX's active memory."""
        self._held = mx.get_active_memory() if held is None else held
        ledger.of_this_process().refresh(self._held)


def announce_idle(part: Hashable) -> None:
    """Report that an unused stage holds its weights and takes nothing in addition."""
    ledger.of_this_process().claim(part, held=mx.get_active_memory(), load=0)


def withdraw(part: Hashable) -> None:
    """Report that a stage is gone."""
    ledger.of_this_process().drop(part, held=mx.get_active_memory())
