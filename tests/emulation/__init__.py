"""Emulators: what is slower, or worse, than what is here, so that one processor shows what several machines would do.

machine         the costs of every stage of a pipeline, its links and drafts, and what its devices are like
device_queue    the times of a device's steps, given when they are launched
files           reads machines from files; ``machines`` has *two-large*, *two-small*, *three-large* and *each-layer*
device          an accelerator that computes on the processor, in the times of a machine
strict          what a processor lets pass and a GPU does not, caught on an emulated accelerator
late_steps      how often computing took longer than the accelerator would have
links           links with latency, bandwidth and jitter
jaccl           devices of RDMA over Thunderbolt, with their limits and faults

``SPLITINFER_ACCELERATOR=FILE`` has every process that inherits it compute on the accelerator of a machine file;
``emulated+tcp://HOST:PORT?latency=0.003`` is a link through an emulated one. Both come here by
``transports.emulation``.
"""
