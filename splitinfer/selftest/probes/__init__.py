"""What acts: each module is a job in a process of its own (``splitinfer.jobs``), and reports plain data.

about       what this machine is and computes on
reference   plain mlx-lm's tokens, how near it was to choosing others, and how far it rounds itself
roads       tokens by one road through a pipeline, beside the reference in the same process
pipelines   the pipelines of the roads
network     whether a worker elsewhere can be reached, and what the link to it carries
branches    what only one kind of device does: each tried, and whether it was taken
costs       what a launch, a wait, and steps by rows take
memory      memory before, with, and after a model
doctor      what ``splitinfer doctor`` finds

Nothing is judged here.
"""
