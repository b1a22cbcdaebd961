"""Does it work here? One set of probes; ``splitinfer doctor`` runs the quick ones, ``splitinfer selftest`` all.

A *probe* looks at something and returns *findings*: a name, an outcome, a sentence, a remedy, and numbers. What looks
and what judges are apart: each ``judge_…`` function takes plain figures, so that tests can plant faults in them.

    doctor ────▶ evidence ─▶ findings, rdma        what the system's commands say; in this process, within seconds
           └───▶ links                             the links of a layout, measured

    selftest ──▶ registry ▶ child ▶ machine, tokens (by plain), memory, links
                                                   each probe in a process of its own, with its share of the time

A device may end a process or never answer. So the process that the user started loads no MLX: it starts the probes,
collects their findings, and writes the page and the document, whatever happens to a probe.
"""
