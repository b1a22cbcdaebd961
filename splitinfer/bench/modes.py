"""Runs one mode of the benchmark: checks its inputs, measures, draws and prints."""

from importlib import import_module
from typing import Any

from splitinfer.bench.shared.inputs import check_file, check_plot, check_text
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import print_found

MODULES = {
    "speed": "speed.run", "prefix": "prefix", "speculation": "speculation.run", "several": "speculation.several",
    "kv": "kv", "wire": "wire", "link": "link", "server": "server.run",
    "compare": "compare.run", "exact": "exact",
}  # fmt: skip
_WIDTH = 150  # columns, where there is no terminal


def measure(mode: str, options: Options) -> int:
    """Measure, print tables and, as the last line, the document; return the exit code.

    Each module has ``measure(options)``, which makes the document, ``tables(found)``, and some have
    ``plot(found, path)``.

    Raises:
        SplitinferError: something cannot be measured.
    """
    module: Any = import_module(f"splitinfer.bench.{MODULES[mode]}")
    check_text(options.text)
    if options.plot is not None:
        check_plot(options.plot)
    if options.report is not None:
        check_file("report", options.report)
    found = module.measure(options)
    if options.plot is not None and hasattr(module, "plot"):
        module.plot(found, options.plot)
    print_found(found, module.tables(found), as_json=options.as_json, least_width=_WIDTH)
    return 0
