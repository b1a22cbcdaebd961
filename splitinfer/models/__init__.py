"""Cuts a model, loads a part of it and holds its caches: everything that touches MLX and knows mlx-lm.

Begin with ``cut`` (a model class that runs some of its layers), ``structure`` (what crosses a cut), ``loader`` (survey,
fit, fetch, load) and ``step`` (rows of many sequences); each module says what it holds and why.
"""
