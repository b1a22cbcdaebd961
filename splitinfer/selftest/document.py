"""The document to be sent in: machine, checks and figures, and nothing that its schema does not name. Pure.

Versions have a form that no address of a network has: at most two digits, and at most three numbers.
"""

import builtins
from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer import errors
from splitinfer.selftest import device, machine, network
from splitinfer.selftest.checks import Check, Reason, State, exit_code
from splitinfer.selftest.outcome import PartOutcome
from splitinfer.selftest.parts import ROADS, WORKER_ROADS
from splitinfer.selftest.schema import Kind, flag, form, listing, number, record, table, word
from splitinfer.selftest.tokens import CASES, WORDS

FORMAT = 1
KIND = "splitinfer selftest"
CONTAINS = (
    "versions, the kind of machine and its sizes, which checks passed, and the times, bytes and numbers of the "
    "built-in demo model's tokens that were measured"
)
CONTAINS_NOT = "names of machines or people, addresses, keys, paths, prompts, or texts of any kind"

_PARTS = ("about", *ROADS, *WORKER_ROADS, "network", "branches", "memory", "doctor", "costs", "exact")
_GROUPS = (*WORDS.values(), device.GROUP, network.GROUP, machine.GROUP, machine.MEMORY, machine.TIMES, machine.EXACT)
_STEPS = tuple(
    f"{model}, {rows}"
    for model in ("demo", "8 x 2048, bfloat16", "8 x 2048, 4-bit")
    for rows in (1, 2, 4, 8, 16, 32, 128, 512)
)
_NAMES = (
    "", *CASES, "loops", "device", "opened", "rounding", *device.NAMES, "connection", "worker", "link", "system",
    "free memory", "load", "advice", "growth", "closing", "wired limit", "launch", "steps", "roads", "memory",
    "RDMA over Thunderbolt", "doctor", "about", "exact", "unavailable", *_STEPS,
)  # fmt: skip
_REQUIREMENTS = (
    "system", "macOS", "Thunderbolt 5", "cable to a Mac", "rdma_ctl", "RDMA devices", "active port",
    "Thunderbolt bridge", "IPv4 address", "MLX with JACCL", "MLX_METAL_FAST_SYNCH", "RDMA",
)  # fmt: skip
_AREAS = ("memory", "network", "power", "process", "firewall", "gpu", "rdma")
_TRANSPORT_ERRORS = (
    "TransportError", "LinkClosed", "LinkTimeout", "ListenerClosed", "FrameError", "AddressError", "AddressInUse",
    "LinkRefused", "TransportUnavailable",
)  # fmt: skip
_ERRORS = tuple(
    name
    for module in (builtins, errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, BaseException)
)
_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGKILL", "SIGTERM", "SIGSYS")
_DTYPES = ("float16", "bfloat16", "float32", "several")
_BACKENDS = ("cpu", "metal", "cuda")
_WAYS = ("rows", "rows and modules", "modules", "sequences")

_VERSION = form(r"\d{1,2}\.\d{1,3}(?:\.\d{1,4})?(?:(?:a|b|rc|\.dev|\.post)\d{1,8})?(?:\+[0-9a-f]{6,12})?")
_SYSTEM_VERSION = form(r"(\d{1,2}\.\d{1,3}(?:\.\d{1,3})?)(?:-.*)?")
_CHIP = form(r"(Apple M\d{1,2}(?: Pro| Max| Ultra)?|AMD|Intel|ARM|NVIDIA)(?:(?:\(R\))? .*)?", "other")
_DEVICE = form(
    r"cpu|gpu|emulated accelerator|Apple M\d{1,2}(?: Pro| Max| Ultra)?|NVIDIA [A-Z0-9]+(?: [A-Z0-9]+){0,5}", "other"
)
_ARCHITECTURE = form(r"arm64|aarch64|x86_64|applegpu_g\d{2}[a-z]|sm_\d{2,3}[a-z]?", "other")
_AT = form(r"(?:splitinfer|transports)(?:\.[a-z_0-9]{1,30}){1,6}:\d{1,5}")

_MACHINE = record(
    system=word(("Darwin", "Linux"), "other"), system_version=_SYSTEM_VERSION, architecture=_ARCHITECTURE, chip=_CHIP,
    device=_DEVICE, device_architecture=_ARCHITECTURE, backend=word(_BACKENDS), gpu=flag, exact=flag,
    openblas=flag, computes_at_launch=flag, processors=number, memory_bytes=number, free_bytes=number,
    swap_used_bytes=number, working_set_bytes=number, buffer_limit=number, load_average=number, python=_VERSION,
    version_splitinfer=_VERSION, version_protocol=number, version_mlx=_VERSION, version_mlx_lm=_VERSION,
)  # fmt: skip
_CHECK = record(
    group=word(_GROUPS), name=word(_NAMES, "other"), state=word(tuple(State)), fault=number, reason=word(tuple(Reason)),
    error=word((*_ERRORS, *_TRANSPORT_ERRORS, ""), "other"), signal=word((*_SIGNALS, ""), "other"), at=_AT,
)  # fmt: skip
_ANSWER = record(
    tokens=number, compared=number, ttft_seconds=number, tokens_per_second=number, cached_tokens=number,
    drafts_sent=number, drafts_accepted=number, kept_before=number,
    partings=listing(record(at=number, token=number, wanted=number, margin=number)),
)  # fmt: skip
_ROAD = record(
    rounding=record(logits_move=number, largest_logit=number, epsilon=number, dtype=word(_DTYPES), exact=flag),
    opened=record(seconds=number),
    device=record(
        waiter=flag, token_budget=number, stages=listing(_DEVICE), busy_seconds=listing(number), steps=listing(number)
    ),
    **dict.fromkeys(CASES, _ANSWER),
)
_VERSIONS = record(protocol=number, splitinfer=_VERSION, mlx=_VERSION, mlx_lm=_VERSION)
_NETWORK = record(
    connection=record(
        problem=word(
            ("name", "timeout", "ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EHOSTDOWN", "ETIMEDOUT",
             "EPERM", "EACCES", "ECONNRESET"), "other",
        ),
        seconds=number,
    ),
    link=record(
        welcome=record(device=_DEVICE, free_bytes=number, versions=_VERSIONS),
        clock=record(offset=number, uncertainty=number),
        figures=record(latency_p50=number, latency_p99=number, down=number, up=number),
        refused=flag,
    ),
)  # fmt: skip
_BRANCH = record(
    taken=flag, waiter=flag, equal=flag, error=number, own_rounding=number, rows=number, completed=number,
    launched=number, calls=number, seconds=number, kept_kv=flag, way=word(_WAYS), dtype=word(_DTYPES, "other"),
)  # fmt: skip
_AT_A_TIME = record(active=number, resident=number, free=number)
_MEMORY = record(
    memory=record(
        before=_AT_A_TIME, loaded=_AT_A_TIME, warm=_AT_A_TIME, used=_AT_A_TIME, closed=_AT_A_TIME, rounds=number,
        peak=number, wired=record(limit=number, recommended=number),
    )
)  # fmt: skip
_DOCTOR = record(
    doctor=record(
        requirements=listing(record(about=word(_REQUIREMENTS, "other"), state=word(("ok", "missing", "unknown")))),
        advice=listing(record(area=word(_AREAS, "other"), severity=word(("problem", "warning", "note")))),
        wired_limit_mb=number,
        kv_disk_free=number,
        backend=word(_BACKENDS),
        hidden_dtype=word(_DTYPES),
    )
)
_COST = record(rows=number, launch_ms=number, step_ms=number, launch_us=listing(number), wait_us=listing(number))
_EXACT = record(
    exact=record(
        batch_invariant=flag,
        way=word(_WAYS),
        margins=record(median=number, smallest=number, ties=number),
        roads=listing(
            record(
                road=form(r"(?:\d+ rows together|beside \d+ rows of a prompt|prompt in chunks of [\d,]+|"
                          r"drafts in blocks of \d+|replay in chunks of [\d,]+)"),
                prompts=number, parted=number, first_token=number, margin=number, largest_margin=number,
                positions=number, positions_that_differ=number, largest_logit_difference=number,
            )
        ),
    )
)  # fmt: skip
_MEASURED: Mapping[str, Kind] = {
    **dict.fromkeys((*ROADS, *WORKER_ROADS), _ROAD),
    "network": _NETWORK,
    "branches": table(device.NAMES, _BRANCH),
    "memory": _MEMORY,
    "doctor": _DOCTOR,
    "costs": table(("launch", *_STEPS), _COST),
    "exact": _EXACT,
}
_TIME = record(seconds=number, limit_s=number)


def document(
    outcomes: Mapping[str, PartOutcome], checks: Sequence[Check], *, seconds: float, limit_s: float, quick: bool
) -> dict[str, Any]:
    """The document of a run, ready to be written as JSON."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "contains": CONTAINS,
        "contains_not": CONTAINS_NOT,
        "exit_code": exit_code(checks),
        "seconds": number(round(seconds, 1)),
        "limit_s": number(limit_s),
        "quick": flag(quick),
        "machine": _MACHINE(outcomes["about"].found.get("about") if "about" in outcomes else None),
        "checks": [_CHECK(_as_mapping(check)) for check in checks],
        "parts": {name: _TIME(_times(outcomes[name])) for name in _PARTS if name in outcomes},
        "measured": {name: kind(outcomes[name].found) for name, kind in _MEASURED.items() if name in outcomes},
    }


def _as_mapping(check: Check) -> dict[str, Any]:
    """A check without its sentences."""
    return {
        "group": check.group, "name": check.name, "state": str(check.state), "fault": int(check.fault),
        "reason": str(check.reason), "error": check.error, "signal": check.signal, "at": check.at,
    }  # fmt: skip


def _times(outcome: PartOutcome) -> dict[str, float]:
    return {"seconds": outcome.seconds, "limit_s": outcome.limit_s}
