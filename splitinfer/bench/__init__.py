"""How fast a layout is, beside plain mlx-lm doing the same work in one process.

workload    what is run, from a seed                    pure
measure     medians, spread, ratios, time by cause      pure
report      one JSON document, and a table of it        pure
contenders  those who run it: an LLM, or plain mlx-lm
baseline    plain mlx-lm, in a process of its own
machine     what it is measured on; processes pinned to processors
blas        which BLAS computes, on Linux
run         the conductor
model       random models of a given shape (scripts/make_bench_model)

The method. Everybody does the same tasks, in turns (A B A B ...), so that what else the machine does falls
on all of them; one computes while the others sleep. Every process has its own processor, where the system
can do that. Prompts are random and new for every trial, so nothing is reused. Each contender is warmed up
first. The first token is no part of a decode rate, an end token ends nothing, and the likeliest token is
taken.
"""
