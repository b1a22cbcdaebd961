"""Optimisations that only a GPU uses. ``SPLITINFER_...=0`` in a process's environment switches one off; local workers
inherit it. None of them changes a result, so each can be switched off if it causes trouble."""

import os
from enum import StrEnum


class Road(StrEnum):
    """One optimisation, named by its variable."""

    LAUNCH_AHEAD = "SPLITINFER_LAUNCH_AHEAD"
    WAITER = "SPLITINFER_WAITER"
    PREPARED_STEPS = "SPLITINFER_PREPARED_STEPS"
    KV_KERNEL = "SPLITINFER_KV_KERNEL"
    COMPILED_SAMPLER = "SPLITINFER_COMPILED_SAMPLER"
    RDMA = "SPLITINFER_RDMA"

    @property
    def is_open(self) -> bool:
        """Whether this process may use it."""
        return os.environ.get(self) != "0"
