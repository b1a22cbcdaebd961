"""``splitinfer selftest``: what the first owner of a machine runs before trusting anything. Three minutes at most.

Every *part* runs in a process of its own with its share of the time (``splitinfer.jobs``), so a crash, a hang or a lost
device is a finding. The process that the user started computes nothing: it starts the parts, judges what they measured,
prints a page, and writes one document to be sent in.

    parts ──▶ run ──▶ a job for each part (probes/: these act)
                │
                ├──▶ judge: what was measured ─▶ checks     tokens, device, machine, network
                ├──▶ page: checks ─▶ text for a person
                └──▶ document: checks and figures ─▶ only what its schema allows

Everything but ``run`` and ``probes`` is pure: values in, values out.

address    where ``--worker`` is
checks     a check, its state, and the exit code that follows from all
parts      the parts, most important first
outcome    what a part's process reported
schema     kinds of values that a document may have; everything else is left out
"""
