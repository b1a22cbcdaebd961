"""The document to be sent in: machine, findings and figures, and nothing private. Pure.

It is made from lists of what may be in it. A key that is not a known name is left out with its value; a text that is
neither a known word nor of a narrow form becomes null; a number is a number. So nothing has to be recognised as
private, because nothing else is let through. Versions have a form that no address of a network has: at most two digits,
and at most three numbers. Sentences and remedies are never in it.
"""

import builtins
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from splitinfer import errors
from splitinfer.probes.child import Result
from splitinfer.probes.finding import Finding, Outcome, Reason, exit_code
from splitinfer.probes.registry import WORKER_NOWHERE, Probe, selftest_probes
from splitinfer.probes.roads import ROADS
from splitinfer.system.gpu_roads import Road

FORMAT = 2
KIND = "splitinfer selftest"
CONTAINS = (
    "versions, the kind of machine and its sizes, which checks passed, and the times, bytes and numbers of the "
    "built-in demo model's tokens that were measured"
)
CONTAINS_NOT = "names of machines or people, addresses, keys, paths, prompts, or texts of any kind"
_MOST = 64  # elements of a list

_PROBES = selftest_probes(WORKER_NOWHERE)
_FINDINGS = (
    "greedy", "sampled", "greedy, drafts", "sampled, drafts", "kept KV", "loops", "rounding", "sampler",
    "quantised attention", "kept dtype", "launching ahead", "cohort", "quantised cohort", "large steps",
    "trials at loading", "device name", "device", "connection", "worker", "link", "free memory", "load", "growth",
    "closing", "wired limit", "launch", "demo", "8 x 2048, bfloat16", "8 x 2048, 4-bit", "exact",
    "RDMA over Thunderbolt", "memory", "network", "power", "process", "firewall", "local network", "gpu", "rdma",
)  # fmt: skip
_REQUIREMENTS = (
    "macOS", "Thunderbolt 5", "cable to a Mac", "rdma_ctl", "RDMA devices", "active port", "Thunderbolt bridge",
    "IPv4 address", "MLX with JACCL", "MLX_METAL_FAST_SYNCH",
)  # fmt: skip
_KEYS = re.findall(
    r"\w+",
    """
system system_version architecture chip processors load_average device device_architecture backend gpu exact openblas
computes_at_launch memory_bytes free_bytes swap_used_bytes working_set_bytes wired_limit_mb buffer_limit python
version_splitinfer version_protocol version_mlx version_mlx_lm kv_disk_free logits_move largest_logit epsilon dtype
tokens compared partings at token wanted margin ttft_seconds tokens_per_second cached_tokens drafts_sent
drafts_accepted kept_before waiter token_budget stages busy_seconds steps taken equal error own_rounding rows
completed launched calls seconds way kept_kv own_processor problem welcome versions own_versions protocol splitinfer
mlx mlx_lm clock offset uncertainty figures latency_p50 latency_p99 down up before loaded warm used closed active
resident free peak rounds wired limit recommended launch_us wait_us count launch_ms step_ms batch_invariant margins
median smallest ties roads road prompts parted first_token largest_margin positions positions_that_differ
largest_logit_difference
    """,
)
_ERRORS = (
    *(name for module in (builtins, errors) for name, value in vars(module).items() if isinstance(value, type)),
    "TransportError", "LinkClosed", "LinkTimeout", "ListenerClosed", "FrameError", "AddressError", "AddressInUse",
    "LinkRefused", "TransportUnavailable",
)  # fmt: skip
_WORDS = (
    "Darwin", "Linux", "cpu", "gpu", "metal", "cuda", "emulated accelerator", "float16", "bfloat16", "float32",
    "several", "rows", "rows and modules", "modules", "sequences", "name", "EINVAL", "ECONNREFUSED",
    "EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EHOSTDOWN", "ETIMEDOUT", "EPERM", "EACCES", "ECONNRESET",
    "other", "arm64", "aarch64", "x86_64", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP",
    "SIGKILL", "SIGTERM", "SIGSYS", "", *Road, ROADS.title,
)  # fmt: skip
_FORMS = (
    r"\d{1,2}\.\d{1,3}(?:\.\d{1,4})?(?:(?:a|b|rc|\.dev|\.post)\d{1,8})?(?:\+[0-9a-f]{6,12})?",  # a version
    r"(\d{1,2}\.\d{1,3}(?:\.\d{1,3})?)-.*",  # a system's: what distributions add is left out
    r"(Apple M\d{1,2}(?: Pro| Max| Ultra)?|AMD|Intel|ARM|NVIDIA)(?:(?:\(R\))? .*)?",
    r"applegpu_g\d{2}[a-z]|sm_\d{2,3}[a-z]?",
    r"(?:splitinfer|transports)(?:\.[a-z_0-9]{1,30}){1,6}:\d{1,5}",  # a line of this project
    r"\d+ rows together|beside \d+ rows of a prompt|prompt in chunks of [\d,]+|drafts in blocks of \d+",
    r"replay in chunks of [\d,]+",
)
_NVIDIA = re.compile(
    r"NVIDIA (?:[A-Z]{0,3}\d{2,4}[A-Z]{0,3}|GeForce RTX \d{4})(?: (?:SXM|PCIe|NVL|Ti|SUPER|\d+GB))*", re.ASCII
)
_KNOWN_FORMS = tuple(re.compile(form, re.ASCII) for form in _FORMS)
_TITLES = tuple(probe.title for probe in _PROBES)
_KNOWN_KEYS = frozenset((*_KEYS, *_FINDINGS, *_REQUIREMENTS, *(probe.name for probe in _PROBES)))
_KNOWN_WORDS = frozenset((*_WORDS, *_FINDINGS, *_ERRORS, *_TITLES, *map(str, Outcome), *map(str, Reason)))


def shareable(value: Any) -> Any:
    """As much of a value as may be in a document.

    >>> shareable({"device": "Apple M4 Max", "hostname": "alice", "mlx": "0.32.4", "rows": [1, "alice", 2]})
    {'device': 'Apple M4 Max', 'mlx': '0.32.4', 'rows': [1, None, 2]}
    """
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: shareable(each) for name, each in value.items() if name in _KNOWN_KEYS}
    return [shareable(each) for each in list(value)[:_MOST]] if isinstance(value, list | tuple) else None


def _text(text: str) -> str | None:
    if text in _KNOWN_WORDS or _NVIDIA.fullmatch(text):
        return text
    for form in _KNOWN_FORMS:
        if (found := form.fullmatch(text)) is not None:
            return found[1] if form.groups else found[0]
    return None


def document(
    probes: Iterable[Probe], results: Mapping[str, Result], *, seconds: float, limit_s: float, quick: bool
) -> dict[str, Any]:
    """The document of a run, ready to be written as JSON."""
    ran = {probe.name: results[probe.name] for probe in probes if probe.name in results}
    findings = [each for result in ran.values() for each in result.findings]
    about = ran["about"].numbers("device") if "about" in ran else None
    return {
        "kind": KIND,
        "format": FORMAT,
        "contains": CONTAINS,
        "contains_not": CONTAINS_NOT,
        "exit_code": exit_code(findings),
        "seconds": round(seconds, 1),
        "limit_s": limit_s,
        "quick": quick,
        "machine": shareable(about),
        "checks": [_check(each) for each in findings],
        "parts": {name: {"seconds": each.seconds, "limit_s": each.limit_s} for name, each in ran.items()},
        "measured": {name: _measured(result.found) for name, result in ran.items() if name != "about"},
    }


def _check(finding: Finding) -> dict[str, Any]:
    """A finding without its sentences. A name or an error that is not known is "other"."""
    said = {"group": finding.group, "name": finding.name, "outcome": str(finding.outcome), "fault": int(finding.fault)}
    ending = {"reason": str(finding.reason), "error": finding.error, "signal": finding.signal, "at": finding.at or None}
    found = {name: shareable(value) for name, value in {**said, **ending}.items()}
    others = {name: "other" for name in ("name", "error", "signal") if found[name] is None}
    return {**found, **others}


def _measured(found: Sequence[Finding]) -> dict[str, Any]:
    return {each.name: shareable(each.numbers) for each in found if each.name in _KNOWN_KEYS and each.numbers}
