"""``splitinfer selftest``: what the first owner of a machine runs before trusting anything. Three minutes at most."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from splitinfer import cleanup
from splitinfer.core.json_text import dumps
from splitinfer.errors import ConfigError
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
    write_json(file, {})
    probes = selftest_probes(worker, quick=quick)
    with cleanup.temporary_folder("splitinfer-selftest-") as folder:
        left = limit_s - _OWN_SECONDS - (time.monotonic() - began)
        results = run_probes(probes, left, folder, partial(_run_shown, run, errors))
    seconds = time.monotonic() - began
    made = document(probes, results, seconds=seconds, limit_s=limit_s, quick=quick)
    write_json(file, made)
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


def write_json(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write a document, whole or not at all; nothing without a path.

    Raises:
        ConfigError: it could not be written.
    """
    if path is None:
        return
    try:
        partial_path = path.with_name(f".{path.name}.partial")
        partial_path.write_text(dumps(found, indent=1) + "\n", encoding="utf-8")
        partial_path.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
