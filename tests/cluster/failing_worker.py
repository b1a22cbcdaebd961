"""``splitinfer worker`` whose device fails, for tests that start real processes (``CODE``): the same command line, and

FAILS=wait:5:MARK       the device fails at its fifth step, in the wait for it; once, which the file MARK says
FAILS=launch:5:MARK     in its launch
FAILS=memory:5:MARK     for lack of memory
FAILS=stands:5:MARK     it never returns from that wait, and the process lives on
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import failing
import mlx.core as mx

from splitinfer.__main__ import main
from splitinfer.engine.device.device import Device
from splitinfer.engine.stage import loader
from splitinfer.errors import DeviceFailed

_FOLDERS = [str(folder) for folder in Path(__file__).parents[:3]]
CODE = f"import sys; sys.path[:0] = {_FOLDERS}; import failing_worker; failing_worker.run()"


def device(kind: str, number: int, mark: Path) -> Device:
    """The device that was wished for; a sound one if that has failed already."""
    if mark.exists():
        return failing.FailingDevice(computes_at_launch=False)
    if kind == "stands":
        mark.touch()
        return failing.StuckDevice(number)
    wish = failing.nth(number, DeviceFailed("the device failed (as a test wished)", kind == "memory"))

    def noted(arrays: Sequence[mx.array]) -> Exception | None:
        error = wish(arrays)
        if error is not None:
            mark.touch()
        return error

    if kind == "wait":
        return failing.FailingDevice(computes_at_launch=False, at_wait=noted)
    return failing.FailingDevice(computes_at_launch=False, at_launch=noted)


def run() -> NoReturn:
    """Run the command that the arguments name."""
    kind, number, mark = os.environ["FAILS"].split(":", 2)
    loader.open_device = lambda _stage, _bounds: device(kind, int(number), Path(mark))
    main()
