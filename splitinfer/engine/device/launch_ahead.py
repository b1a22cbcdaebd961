"""Whether the loops of a process may launch a step while another is under way. To measure what that is worth,
``SPLITINFER_LAUNCH_AHEAD=0`` has every device used as one that computes at launch, in local workers too."""

import os

VARIABLE = "SPLITINFER_LAUNCH_AHEAD"


def may_launch_ahead() -> bool:
    """Whether they may, where the device computes while its host goes on."""
    return os.environ.get(VARIABLE) != "0"
