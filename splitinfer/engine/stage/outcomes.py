"""What was found when a stage was tried on this machine (``models.rows.step_trial``, ``kv_trial``), and the memory of
it in the user's folder of state (``trials/DIGEST.json``): the same stage is tried once.

The digest is of all that an outcome depends on: weights, layers, formats; versions and the code that tries; the
machine's name (home folders may be shared), its device and its BLAS. A file that cannot be read or written is as good
as none. What is not sure, because the device may have failed a trial, is not remembered.
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
from splitinfer.models.blas import has_openblas, is_batch_invariant
from splitinfer.models.caches.attention import backend
from splitinfer.models.caches.rollback import Rollback
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.load.layer_kinds import with_each_kind
from splitinfer.models.rows.kv_trial import off_by, try_rollback, why_no_blocks
from splitinfer.models.rows.step import StepModel, Way
from splitinfer.places import replace_file, state
from splitinfer.wire.messages import Load

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What the trials of a stage found.

    kv_error: relative, of its output with KV in the format that is asked for; 0 for exact KV.
    why_no_blocks: why its KV cannot be stored in blocks; ``None`` if it can.
    way: how rows of many sequences are run. shares_calls: whether plain caches share attention calls in it.
    rollback: how its states are rolled back; ``None`` if they cannot be.
    is_sure: whether no trial may have failed by a fault of the device.
    """

    kv_error: float
    why_no_blocks: str | None
    way: Way
    shares_calls: bool
    rollback: Rollback | None
    is_sure: bool = True


_OF_A_DEVICE = ("RuntimeError", "MemoryError")  # what MLX raises for it; for wrong shapes it raises ValueError


def try_stage(stage: StageModel, kv_format: str, say: Callable[[str], None]) -> TrialOutcome:
    """Try a stage that was read. The stage uses KV of that format afterwards. ``say``: called with what is being tried.

    What depends on the kind of a layer is tried with a few layers. All of them are if the way that is right for these
    is wrong for the stage."""
    say("how KV is kept")
    known = format_of(kv_format)
    error = off_by(stage, known) if known is not None else 0.0
    few = with_each_kind(stage)
    few.use_format(known)
    outcome = _try(few, error, say)
    if few is not stage:
        say("all layers together")
        wrong = StepModel(stage).why_not_all(outcome.way, shares_calls=outcome.shares_calls)
        if wrong is not None:
            log.info("some layers differ from others of their kind: %s", wrong)
            outcome = _try(stage, error, say)
    return outcome


def _try(stage: StageModel, kv_error: float, say: Callable[[str], None]) -> TrialOutcome:
    no_blocks = why_no_blocks(stage)
    say("how many sequences run together")
    step = StepModel(stage)
    way, shares_calls = step.way, step.shares_calls
    say("how drafts are rolled back")
    rollback = try_rollback(stage, step)
    is_sure = not any(why.startswith(_OF_A_DEVICE) for why in [no_blocks or "", *step.refusals])
    return TrialOutcome(kv_error, no_blocks, way, shares_calls, rollback, is_sure)


def path_of(command: Load, checkpoint: Checkpoint, dtype: str | None) -> Path:
    """Return where the outcome of a stage is remembered. ``dtype``: of its numbers as loaded."""
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
    """Return a digest of the code that runs and tries models: a checkout's version stays the same while that
    changes."""
    files = sorted(Path(models.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def remembered(path: Path) -> TrialOutcome | None:
    """Return the outcome that is remembered there."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        rollback = None if found["rollback"] is None else Rollback(found["rollback"])
        return TrialOutcome(**{**found, "way": Way(found["way"]), "rollback": rollback})
    return None


def remember(path: Path, outcome: TrialOutcome) -> None:
    """Remember an outcome there, where that can be done."""
    try:
        replace_file(path, json.dumps(asdict(outcome)) + "\n")
    except OSError as error:
        log.info("what was tried of a stage is not remembered: %s", error)
