"""Names the machine that this process emulates, if any: ``SPLITINFER_ACCELERATOR`` is the path of its file.

The variable is for every process of a pipeline; a local worker inherits it.
"""

import os
from pathlib import Path

VARIABLE = "SPLITINFER_ACCELERATOR"


def emulated_machine() -> Path | None:
    """Return the file of the machine that this process emulates. Return None if it uses the real device."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None
