"""Which device a process computes its stage on: MLX's default device, or an emulated accelerator.

``SPLITINFER_ACCELERATOR`` names a machine file. Every process that inherits it, local workers too, then computes on the
CPU in the times of that machine's stage. With ``SPLITINFER_LAUNCH_AHEAD=0`` every device is used as one that computes
at launch, to measure what launching ahead is worth.
"""

import os
import sys
from functools import cache
from pathlib import Path

from splitinfer.engine.device.device import Device
from splitinfer.engine.device.emulated import EmulatedDevice
from splitinfer.engine.device.mlx_device import MlxDevice
from splitinfer.engine.device.variables import ACCELERATOR, LAUNCH_AHEAD
from splitinfer.machine.files import read_machine_file
from splitinfer.models.memory import on_gpu

_SWITCH = 0.0005  # seconds until a thread that waits for the interpreter's lock gets it


def is_emulated() -> bool:
    """Whether this process emulates an accelerator."""
    return bool(os.environ.get(ACCELERATOR))


def open_device(stage: int, bounds: tuple[int, ...]) -> Device:
    """The device of stage ``stage``, whose layers are ``bounds[stage]`` to ``bounds[stage + 1]``.

    Raises:
        ConfigError: the machine file cannot be read, or does not fit the layout.
    """
    if not is_emulated():
        return default_device()
    _share_the_interpreter()
    found = read_machine_file(Path(os.environ[ACCELERATOR])).accelerator(
        stage, len(bounds) - 1, bounds[stage + 1] - bounds[stage]
    )
    return EmulatedDevice(found, computes_at_launch=not _may_launch_ahead())


@cache
def default_device() -> Device:
    """MLX's default device. A process has one, whatever it computes there."""
    if on_gpu():
        _share_the_interpreter()
    return MlxDevice(computes_at_launch=not (on_gpu() and _may_launch_ahead()))


def _may_launch_ahead() -> bool:
    return os.environ.get(LAUNCH_AHEAD) != "0"


def _share_the_interpreter() -> None:
    """Let the thread that waits for a step go on soon, though another builds the next one's graph."""
    sys.setswitchinterval(_SWITCH)
