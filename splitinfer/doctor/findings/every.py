"""All findings on a machine, the worst first."""

from splitinfer.doctor.findings import firewall, memory, network, nvidia, power, process, rdma
from splitinfer.doctor.findings.finding import Finding, Seen, Severity

_AREAS = (firewall, network, memory, process, power, nvidia, rdma)
_ORDER = list(Severity)


def every_finding(seen: Seen) -> list[Finding]:
    """Every finding; those of equal severity in the order of their areas."""
    found = [each for area in _AREAS for each in area.findings(seen)]
    return sorted(found, key=lambda each: _ORDER.index(each.severity))
