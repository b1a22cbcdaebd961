"""The times of a device that computes while the host goes on: a queue in order. Pure; times are arguments.

A step is a number of command buffers that the device completes one after the other, each in an equal share of the
step's time. At most ``max_buffers`` of them are under way at a time: who launches a step is held until the others have
been submitted, which is for most of a large step. (MLX on Metal: ``mlx/transforms.cpp`` holds ``async_eval`` at 10;
``mlx/backend/metal/device.cpp`` ends a buffer after some ten operations.)

    launched        started                        returns            ended  done
       |  in line      |  ....  buffers  ....          |  max_buffers   |  wait |

A device that has been idle for ``idle_after`` seconds has lowered its clock: the next step takes ``idle_factor`` times
as long. (llama.cpp, issue 10119: 63 to 318 ms on an M2 Ultra.)
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as numbers

from splitinfer.machine.costs import Count, NotNegative

MAX_BUFFERS = 10
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@numbers(frozen=True, slots=True)
class DeviceTraits:
    """What a device is like beside the seconds of its steps.

    max_buffers: command buffers under way at a time, at most.
    wait: seconds from the end of a step until a thread that waits for it goes on.
    idle_after, idle_factor: after so many idle seconds the next step takes so many times as long.
    rounds_like: a chip of ``metal.CHIPS`` like whose kernels products round; "" for this processor.

    Raises:
        ValueError: a number is out of its range.
    """

    max_buffers: Count = MAX_BUFFERS
    wait: NotNegative = 0.0
    idle_after: Positive = 1.0
    idle_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    rounds_like: Literal["", "M1", "M2 Ultra", "M3", "M3 Ultra", "M4 Max", "M5", "M5 Max"] = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """One launch, in seconds on one clock: when the device begins and ends it, when the launching thread may go on, and
    when a thread that waits for the step does."""

    started: float
    ended: float
    returns: float
    done: float


@dataclass(slots=True)
class DeviceQueue:
    """A device's steps in the order of their launches."""

    traits: DeviceTraits = field(default_factory=DeviceTraits)
    free_at: float = 0.0
    _recent: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=64))  # start, end, buffers

    def launch(self, now: float, seconds: float, buffers: int = 1) -> Timing:
        """Launch a step of ``seconds`` in ``buffers`` command buffers at ``now``, which never goes back."""
        started = max(now, self.free_at)
        if now - self.free_at > self.traits.idle_after and self._recent:
            seconds *= self.traits.idle_factor
        ended = started + seconds
        self._recent.append((started, ended, max(1, buffers)))
        self.free_at = ended
        return Timing(started, ended, max(now, self._returns()), ended + self.traits.wait)

    def delay(self, until: float) -> None:
        """Note that the step launched last ended only at ``until``, because something else took longer."""
        if until > self.free_at and self._recent:
            started, _, buffers = self._recent.pop()
            self._recent.append((started, until, buffers))
            self.free_at = until

    def _returns(self) -> float:
        """When all but ``max_buffers`` of the buffers launched so far are complete."""
        left = self.traits.max_buffers
        for started, ended, buffers in reversed(self._recent):
            if buffers > left:
                return ended - (ended - started) * left / buffers
            left -= buffers
        return 0.0
