"""Runs one mode of the benchmark: checks its inputs, measures, draws and prints."""

from dataclasses import replace
from importlib import import_module
from typing import Any

from splitinfer.bench.shared.inputs import check_file, check_plot, check_text
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import print_found
from splitinfer.bench.shared.stand_in import stand_in_layout
from splitinfer.errors import ConfigError
from splitinfer.machine.files import read_machine
from splitinfer.machine.selection import emulated_machine

MODULES = {
    "speed": "speed.run", "prefix": "prefix", "speculation": "speculation.run", "several": "speculation.several",
    "serve": "serving.run", "kv": "kv", "wire": "wire", "link": "link", "device": "device", "server": "server.run",
    "compare": "compare.run", "exact": "exact",
}  # fmt: skip
_STAND_INS = {
    "several": 512,
    "device": 512,
    "server": 2048,
}  # tokens of the model that stands in for a layout's
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
    if not options.layout and mode in _STAND_INS:
        options = replace(options, layout=_stand_in(mode))
    found = module.measure(options)
    if options.plot is not None and hasattr(module, "plot"):
        module.plot(found, options.plot)
    print_found(found, module.tables(found), as_json=options.as_json, least_width=_WIDTH)
    return 0


def _stand_in(mode: str) -> str:
    file = emulated_machine()
    if file is None:
        name = "speculation" if mode == "several" else mode
        raise ConfigError(f"--mode {name} needs a layout (--layout FILE), or a machine to emulate (--accelerator FILE)")
    return str(stand_in_layout(read_machine(file).num_stages, vocab=_STAND_INS[mode]))
