"""Which device a process computes its stage on: MLX's default device, or an emulated accelerator.

``SPLITINFER_ACCELERATOR`` names a machine file. Every process that inherits it, local workers too, then computes on the
CPU in the times of that machine's stage.
"""

import sys
from functools import cache
from itertools import pairwise

from splitinfer.engine.device.device import Device
from splitinfer.engine.device.mlx_device import MlxDevice
from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import on_gpu
from splitinfer.system.gpu_roads import Road

_SWITCH = 0.0001  # seconds until a thread that waits for the interpreter's lock gets it; reading a result waits thrice


def open_device(stage: int, bounds: tuple[int, ...]) -> Device:
    """The device of stage ``stage``, whose layers are ``bounds[stage]`` to ``bounds[stage + 1]``.

    Raises:
        ConfigError: the machine file cannot be read, or does not fit the layout.
    """
    file = emulated_machine()
    if file is None:
        return default_device()
    from splitinfer.engine.device.emulated import EmulatedDevice
    from splitinfer.engine.device.strict import strict_device
    from splitinfer.machine.files import read_devices  # and YAML with it, which no other stage needs

    _share_the_interpreter()
    found = read_devices(file, [end - start for start, end in pairwise(bounds)])[stage]
    return EmulatedDevice(found, computes_at_launch=not Road.WAITER.is_open, strict=strict_device())


@cache
def default_device() -> Device:
    """MLX's default device. A process has one, whatever it computes there."""
    if on_gpu():
        _share_the_interpreter()
    return MlxDevice(computes_at_launch=not (on_gpu() and Road.WAITER.is_open))


def _share_the_interpreter() -> None:
    """Let the thread that waits for a step go on soon, though another builds the next one's graph."""
    sys.setswitchinterval(_SWITCH)
