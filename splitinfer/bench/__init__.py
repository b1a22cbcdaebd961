"""Measures a layout, beside plain mlx-lm doing the same work on this machine.

speed          one stream, with drafts and without, many streams, a long prompt, a second turn
parts          what is measured: the rows of a table, and their prompts
systems        what does it: the pipeline, and mlx-lm in a process of its own

Both systems do the same tasks; one computes while the other sleeps. Each is warmed up first. Decoding is greedy, decode
rates leave the first token out, and an end token ends nothing.
"""
