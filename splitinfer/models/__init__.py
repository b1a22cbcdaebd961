"""Cuts a model, loads a part of it and holds its caches: all code that touches MLX and knows mlx-lm.

Begin with ``cut`` (a model class that runs some of its layers), ``structure`` (the arrays that cross a cut), ``loader``
(survey, fit, fetch, load) and ``step`` (rows of many sequences).
"""
