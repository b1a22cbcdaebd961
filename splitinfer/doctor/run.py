"""``splitinfer doctor``: inspects the machine and the links, judges and shows what was found."""

import os
import platform

import mlx.core as mx

from splitinfer.core.layout import Layout
from splitinfer.doctor.advice import Hidden, LinkAdvice, advise
from splitinfer.doctor.commands import COMMANDS, run_commands
from splitinfer.doctor.hidden_states import codecs_of, hidden_of
from splitinfer.doctor.links import LinkSeen, LinkSurvey, Progress, SurveyResult
from splitinfer.doctor.machine import describe
from splitinfer.doctor.rdma import Seen, findings
from splitinfer.doctor.report import LayoutReport, Report, show
from splitinfer.keyring import Keyring


def run_doctor(layout: Layout | None, *, connect_timeout: float, as_json: bool, notice: Progress) -> int:
    """Show this machine, and the links of ``layout`` if there is one; the exit code, 1 if a link cannot be measured."""
    report = inspect(layout, connect_timeout, notice)
    show(report, as_json=as_json)
    return 0 if report.layout is None or report.layout.result.is_whole else 1


def inspect(layout: Layout | None, connect_timeout: float, notice: Progress) -> Report:
    """The report on this machine, and on the links of ``layout`` if there is one."""
    outputs = run_commands(COMMANDS)
    seen = Seen(outputs, platform.system(), bool(mx.distributed.is_available("jaccl")), os.environ)
    links = None if layout is None else survey_layout(layout, connect_timeout, notice)
    return Report(describe(outputs), tuple(findings(seen)), links)


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
