"""Measures a layout beside plain mlx-lm with the same tasks on this machine.

speed          one stream, with drafts and without, many streams, a long prompt, a second turn
parts          the measured tasks: the rows of a table, and their prompts
systems        the measured systems: the pipeline, and mlx-lm in a process of its own

Both systems do the same tasks; one computes while the other sleeps. Each is warmed up first. Decoding is greedy, decode
rates leave the first token out, and an end token does not end an answer.
"""
