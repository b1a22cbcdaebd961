"""Measures a layout, beside plain mlx-lm doing the same work on this machine.

speed          one stream, with drafts and without, many streams, a long prompt, a second turn
compare        one table to share: the same, a killed worker, kept KV, mlx-lm's own ways, and whether answers are right
link           links, beside bare ZeroMQ

parts          what is measured: the rows of a table, and their prompts
systems        what does it: the pipeline, mlx-lm in a process of its own, mlx-lm's own pipeline

All systems do the same tasks; one computes while the others sleep. Every process has its own processor, where the
system can pin. Each system is warmed up first. Decoding is greedy, decode rates leave the first token out, and an end
token ends nothing.
"""
