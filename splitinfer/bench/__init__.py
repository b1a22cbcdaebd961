"""How fast a layout is, beside plain mlx-lm doing the same work in one process.

workload    what is run, from a seed                    pure
measure     medians, spread, ratios, time by cause      pure
throughput  many sequences: the window in which all decode, and its figures    pure
report      one JSON document                           pure
tables      ... for people                              pure
systems  those who run it: an LLM, or mlx-lm
child       a process that obeys line by line
baseline    plain mlx-lm, in such a process
peers       mlx-lm's own pipeline, in several
nodes       how large the graph of a step is
kept, spec, serve, quantised_kv, wire, links    the other modes
machine     what it is measured on; processes pinned to processors
blas        which BLAS computes, on Linux
run         the conductor
model       random models of a given shape (scripts/make_bench_model)

The method. Everybody does the same tasks, in turns (A B A B ...), so that what else the machine does falls
on all of them; one computes while the others sleep. Every process has its own processor, where the system
can do that. Prompts are random and new for every trial, so nothing is reused. Each system is warmed up
first. The first token is no part of a decode rate, an end token ends nothing, and the likeliest token is
taken.
"""
