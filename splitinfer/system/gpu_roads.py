"""What only a GPU does, and the variable that has a process do without it: ``SPLITINFER_...=0`` in its environment,
which local workers inherit. None of it changes what is computed, so each can be left out where it goes wrong."""

import os
from enum import StrEnum


class Road(StrEnum):
    """One of these, by its variable."""

    LAUNCH_AHEAD = "SPLITINFER_LAUNCH_AHEAD"
    WAITER = "SPLITINFER_WAITER"
    PREPARED_STEPS = "SPLITINFER_PREPARED_STEPS"
    KV_KERNEL = "SPLITINFER_KV_KERNEL"
    COMPILED_SAMPLER = "SPLITINFER_COMPILED_SAMPLER"
    RDMA = "SPLITINFER_RDMA"

    @property
    def is_open(self) -> bool:
        """Whether this process may take it."""
        return os.environ.get(self) != "0"
