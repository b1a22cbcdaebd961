"""NVIDIA's GPUs: ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``."""

from dataclasses import dataclass

FIELDS = (
    "name", "driver_version", "memory.total", "memory.used",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; memory in MiB. ``is_throttled``: whether heat slows it now."""

    name: str
    driver: str
    memory: int | None
    used: int | None
    is_throttled: bool


def gpus(text: str) -> list[Gpu]:
    """The GPUs, from a query of ``FIELDS``; a value that nvidia-smi does not know is "[N/A]".

    >>> gpus("NVIDIA H200, 580.95.05, 143771, 512, Not Active, Not Active")
    [Gpu(name='NVIDIA H200', driver='580.95.05', memory=143771, used=512, is_throttled=False)]
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(name, driver, _number(memory), _number(used), "Active" in reasons)
        for name, driver, memory, used, *reasons in (row for row in rows if len(row) == len(FIELDS))
    ]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None
