"""``splitinfer selftest``: what the first owner of a machine runs before trusting anything. Three minutes at most."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from splitinfer import cleanup
from splitinfer.core.json_text import dumps
from splitinfer.places import write
from splitinfer.probes.child import Result, run_probe, run_probes
from splitinfer.probes.finding import exit_code
from splitinfer.probes.page import print_page, selftest_page
from splitinfer.probes.registry import USUAL_SECONDS, Probe, selftest_probes
from splitinfer.probes.sharing import document

_OWN_SECONDS = 2.0  # for the page, and for ending processes


def run_selftest(
    worker: Mapping[str, Any] | None = None,
    limit_s: float = USUAL_SECONDS,
    *,
    quick: bool = False,
    file: Path | None = None,
    run: Any = run_probe,
) -> int:
    """Run everything, in at most ``limit_s`` seconds; the exit code. ``worker``: what a layout's stage says of one that
    runs elsewhere; ``file``: for the document; ``run``: runs one probe.

    Raises:
        ConfigError: the document could not be written.
    """
    began, errors = time.monotonic(), Console(stderr=True, highlight=False)
    if file is not None:
        write(file, "{}\n")  # that it cannot be written is told before three minutes
    probes = selftest_probes(worker, quick=quick)
    with cleanup.temporary_folder("splitinfer-selftest-") as folder:
        left = limit_s - _OWN_SECONDS - (time.monotonic() - began)
        results = run_probes(probes, left, folder, partial(_run_shown, run, errors))
    seconds = time.monotonic() - began
    made = document(probes, results, seconds=seconds, limit_s=limit_s, quick=quick)
    if file is not None:
        write(file, dumps(made, indent=1) + "\n")
    findings = [each for probe in probes for each in results[probe.name].findings]
    print_page(selftest_page(findings, seconds=seconds, file=None if file is None else str(file)))
    return exit_code(findings)


def _run_shown(run: Any, errors: Console, probe: Probe, limit: float, folder: str, **more: Any) -> Result:
    """Run a probe, and say so on standard error."""
    with errors.status(f"{probe.name}, at most {limit:.0f} s"):
        result: Result = run(probe, limit, folder, **more)
    if not errors.is_terminal:
        errors.print(f"{probe.name}: {result.seconds:.1f} s", soft_wrap=True)
    return result
