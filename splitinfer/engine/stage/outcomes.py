"""What was found when a stage was tried on this machine (``models.step_trial``, ``kv_trial``), and
the memory of it in the user's folder of state (``trials/DIGEST.json``): the same stage is tried once.

The digest is of all that an outcome depends on: the weights' fingerprint, the layers, the formats; the versions and the
code that tries; the machine's name (home folders may be shared), its device and its BLAS. A file that cannot be read or
written is as good as none. The stage is tried again where the device may have failed a trial, which may have been a
passing thing, until trials have found the same twice.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from splitinfer import models
from splitinfer.core.kv.format import format_of
from splitinfer.engine.versions import device_name, machine_name, own_versions
from splitinfer.models.attention import backend
from splitinfer.models.blas import has_openblas, is_batch_invariant
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.cut import StageModel
from splitinfer.models.kv_trial import off_by, try_rollback, why_no_blocks
from splitinfer.models.layer_kinds import with_each_kind
from splitinfer.models.rollback import Rollback
from splitinfer.models.step import StepModel, Way
from splitinfer.places import replace_file, state
from splitinfer.wire.messages import Load

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the trials of a stage found.

    kv_error: relative, of its output with KV in the format that is asked for; 0 for exact KV.
    why_no_blocks: why its KV cannot be stored in blocks; ``None`` if it can.
    way: how rows of many sequences are run. shares_calls: whether plain caches share attention calls in it.
    rollback: how its states are rolled back; ``None`` if they cannot be.
    """

    kv_error: float
    why_no_blocks: str | None
    way: Way
    shares_calls: bool
    rollback: Rollback | None


_OF_A_DEVICE = ("RuntimeError", "MemoryError")  # what MLX raises for it; for wrong shapes it raises ValueError


def try_stage(stage: StageModel, kv_format: str, say: Callable[[str], None]) -> tuple[Outcome, bool]:
    """Try a stage that was read; the outcome, and whether it is sure. The stage uses KV of that format afterwards.
    ``say``: called with what is being tried.

    What depends on the kind of a layer is tried with a few layers. All of them are if the way that is right for these
    is wrong for the stage."""
    say("how KV is kept")
    known = format_of(kv_format)
    error = off_by(stage, known) if known is not None else 0.0
    few = with_each_kind(stage)
    few.use_format(known)
    outcome, is_sure = _try(few, error, say)
    if few is not stage:
        say("all layers together")
        wrong = StepModel(stage).why_not_all(outcome.way, shares_calls=outcome.shares_calls)
        if wrong is not None:
            log.info("some layers differ from others of their kind: %s", wrong)
            outcome, is_sure = _try(stage, error, say)
    return outcome, is_sure


def _try(stage: StageModel, kv_error: float, say: Callable[[str], None]) -> tuple[Outcome, bool]:
    no_blocks = why_no_blocks(stage)
    say("how many sequences run together")
    step = StepModel(stage)
    way, shares_calls = step.way, step.shares_calls
    say("how drafts are rolled back")
    outcome = Outcome(kv_error, no_blocks, way, shares_calls, try_rollback(stage, step))
    return outcome, not any(why.startswith(_OF_A_DEVICE) for why in [no_blocks or "", *step.refusals])


def path_of(command: Load, checkpoint: Checkpoint, dtype: str | None) -> Path:
    """Where the outcome of a stage is remembered. ``dtype``: of its numbers as loaded."""
    own = command.drafter_fingerprint
    depends_on = (
        *(checkpoint.fingerprint().digest(), command.start, command.end, command.bounds[-1], dtype, command.kv_format),
        *(command.float32_head, command.drafter, own and own.digest(), command.sees, command.mlx_vlm),
        command.half and command.half.rank,
        *(own_versions(), _code(), machine_name(), device_name(), backend(), is_batch_invariant(), has_openblas()),
    )
    return state() / "trials" / f"{hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]}.json"


@cache
def _code() -> str:
    """A digest of the code that runs and tries models: a checkout's version stays the same while that changes."""
    files = sorted(Path(models.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def remembered(path: Path) -> Outcome | None:
    """The outcome that is remembered there, if it is to be believed."""
    outcome, is_sure = _read(path)
    return outcome if is_sure else None


def _read(path: Path) -> tuple[Outcome | None, bool]:
    """The outcome in a file, and whether it is sure."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        is_sure, rollback = found.pop("is_sure"), found["rollback"]
        named = {"way": Way(found["way"]), "rollback": None if rollback is None else Rollback(rollback)}
        return Outcome(**{**found, **named}), is_sure is True
    return None, False


def remember(path: Path, outcome: Outcome, *, is_sure: bool) -> None:
    """Remember an outcome there, where that can be done."""
    is_sure = is_sure or _read(path)[0] == outcome
    try:
        replace_file(path, json.dumps({**asdict(outcome), "is_sure": is_sure}) + "\n")
    except OSError as error:
        log.info("what was tried of a stage is not remembered: %s", error)
