"""Answers a coordinator that asks for this machine's profile."""

import json
import logging
from collections.abc import Callable, Sequence

from splitinfer.core.layout import DTYPES
from splitinfer.engine.profiling.question import Question, checkpoint_of
from splitinfer.engine.profiling.remembered import profile_here
from splitinfer.errors import ProtocolError
from splitinfer.wire.messages import Profile, Profiled, Progress

log = logging.getLogger(__name__)

_MAX_NAME = 4096  # characters


def answer(command: Profile, parts: Sequence[memoryview], name: str, report: Callable[[Progress], None]) -> Profiled:
    """This machine's profile. ``report`` is called with each step that is timed, and raises to end the measuring.

    Raises:
        ProtocolError: the message has no description of a model, or one that cannot be read.
        ModelError, ConfigError, DeviceFailed: as ``profile_here``.
    """
    if len(parts) != 1 or command.dtype not in DTYPES or len(command.model) > _MAX_NAME:
        raise ProtocolError(
            f"a profile message came with {len(parts)} descriptions, the dtype {command.dtype!r:.40} and a model's "
            f"name of {len(command.model)} characters"
        )
    with checkpoint_of(parts[0]) as checkpoint:
        question = Question(command.model, checkpoint, command.dtype, command.kv_format)
        profile, is_new = profile_here(
            name, question, lambda done, total: report(Progress("measure", done, total)), again=command.again
        )
    log.info("%s for %s", "measured this machine" if is_new else "remembered what this machine does", command.model)
    return Profiled(json.dumps(profile.as_dict()), is_new)
