"""Outcomes of a stage's trials on this machine (``models.rows.step_trial``, ``kv_trial``). They are saved in the user's
state folder (``trials/DIGEST.json``), so that the same stage is tried only once.

The digest covers everything that an outcome depends on: weights, layers, formats; versions and the code of the trials;
the machine's name (home folders may be shared), its device and its BLAS. A file that cannot be read or written counts
as missing. An outcome is not saved if the device may have failed a trial.
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
    """The outcome of a stage's trials.

    kv_error: the relative error of its output with KV in the requested format; 0 for exact KV.
    why_no_blocks: why its KV cannot be stored in blocks; ``None`` if it can.
    way: how rows of many sequences are run. shares_calls: whether plain caches share attention calls in it.
    rollback: how its states are rolled back; ``None`` if they cannot be.
    is_sure: whether no trial can have failed because of the device.
    """

    kv_error: float
    why_no_blocks: str | None
    way: Way
    shares_calls: bool
    rollback: Rollback | None
    is_sure: bool = True


_OF_A_DEVICE = ("RuntimeError", "MemoryError")  # MLX's errors of a device; for wrong shapes it raises ValueError


def try_stage(stage: StageModel, kv_format: str, say: Callable[[str], None]) -> TrialOutcome:
    """Try a stage whose weights are read, and return the outcome. It uses KV of ``kv_format`` afterwards. ``say`` is
    called with the subject of each trial.

    Properties of the kinds of layers are tried with a few layers. If their outcome is wrong for the whole stage, all
    layers are tried."""
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
    """Return the file for the outcome of a stage. ``dtype``: the dtype of its loaded weights."""
    own = command.drafter_fingerprint
    depends_on = (
        *(checkpoint.fingerprint().digest(), command.start, command.end, command.bounds[-1], dtype, command.kv_format),
        *(command.float32_head, command.drafter, own and own.digest(), command.sees, command.mlx_vlm),
        command.drafter_dtype,
        command.half and command.half.rank,
        *(own_versions(), _code(), machine_name(), device_name(), backend(), is_batch_invariant(), has_openblas()),
    )
    return state() / "trials" / f"{hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]}.json"


@cache
def _code() -> str:
    """Return a digest of the code that runs and tries models, because a checkout's code may change while its version
    stays the same."""
    files = sorted(Path(models.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def remembered(path: Path) -> TrialOutcome | None:
    """Return the outcome saved at ``path``, or None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        rollback = None if found["rollback"] is None else Rollback(found["rollback"])
        return TrialOutcome(**{**found, "way": Way(found["way"]), "rollback": rollback})
    return None


def remember(path: Path, outcome: TrialOutcome) -> None:
    """Save an outcome at ``path``, if that is possible."""
    try:
        replace_file(path, json.dumps(asdict(outcome)) + "\n")
    except OSError as error:
        log.info("what was tried of a stage is not remembered: %s", error)
