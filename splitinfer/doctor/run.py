"""``splitinfer doctor``: inspects the machine and the links, judges and shows what was found."""

import os
import platform
import sys
from pathlib import Path

import mlx.core as mx
import psutil

from splitinfer.core.layout import Layout
from splitinfer.doctor.advice import Hidden, LinkAdvice, advise
from splitinfer.doctor.commands import commands_of, run_commands
from splitinfer.doctor.findings.every import every_finding
from splitinfer.doctor.findings.finding import Output, Seen
from splitinfer.doctor.findings.rdma import requirements
from splitinfer.doctor.hidden_states import codecs_of, hidden_of
from splitinfer.doctor.links import LinkSeen, LinkSurvey, Progress, SurveyResult
from splitinfer.doctor.looking import other_processes, ways_to
from splitinfer.doctor.machine import describe
from splitinfer.doctor.report import LayoutReport, Report, show
from splitinfer.keyring import Keyring
from splitinfer.models.memory import on_gpu
from splitinfer.system.interfaces import wireless_interfaces
from splitinfer.system.origin import this_process
from transports.rdma import leftovers


def run_doctor(layout: Layout | None, *, connect_timeout: float, as_json: bool, notice: Progress) -> int:
    """Show this machine, and the links of ``layout`` if there is one; the exit code, 1 if a link cannot be measured."""
    report = inspect(layout, connect_timeout, notice)
    show(report, as_json=as_json)
    return 0 if report.layout is None or report.layout.result.is_whole else 1


def inspect(layout: Layout | None, connect_timeout: float, notice: Progress) -> Report:
    """The report on this machine, and on the links of ``layout`` if there is one."""
    seen = look(layout)
    links = None if layout is None else survey_layout(layout, connect_timeout, notice)
    origin = str(seen.origin)
    return Report(describe(seen.outputs), tuple(requirements(seen)), links, tuple(every_finding(seen)), origin)


def look(layout: Layout | None) -> Seen:
    """The evidence on this machine, before links are measured: local workers would be found among its processes."""
    system, memory = platform.system(), psutil.virtual_memory()
    outputs: dict[str, Output] = run_commands(commands_of(system))
    return Seen(
        outputs,
        system,
        has_jaccl=bool(mx.distributed.is_available("jaccl")),
        environment=os.environ,
        memory=int(memory.total),
        available=int(memory.available),
        on_gpu=on_gpu(),
        executable=str(Path(sys.executable).resolve()),
        prefix=sys.base_prefix,
        origin=this_process(),
        processes=other_processes(),
        ways=ways_to(layout),
        wireless=wireless_interfaces(),
        killed_in_rdma=leftovers.warning(leftovers.read()),
    )


def survey_layout(layout: Layout, connect_timeout: float, notice: Progress) -> LayoutReport:
    """The report on a layout's links, measured one after the other."""
    with LinkSurvey(layout, Keyring().own, connect_timeout, notice) as survey:
        result = survey.run()
    hidden = hidden_of(layout)
    return LayoutReport(layout.name, hidden, result, _advice(result, hidden))


def _advice(result: SurveyResult, hidden: Hidden) -> tuple[LinkAdvice | None, ...]:
    known = codecs_of(hidden) if any(_is_advised(link) for link in result.links) else []
    return tuple(
        advise(link.figures, hidden, known) if link.figures is not None and _is_advised(link) else None
        for link in result.links
    )


def _is_advised(link: LinkSeen) -> bool:
    return link.figures is not None and link.carries == "hidden states"
