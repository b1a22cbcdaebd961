"""Cutting a model, loading a part of it, and its caches: everything that touches MLX and knows mlx-lm.

checkpoint     what a model folder holds, read from the headers alone; its fingerprint
hub            "demo", a local folder or a hub id -> a checkpoint; downloads only what is needed
mlx_lm         what is used of mlx-lm, without its package, which would bring transformers
cut            one mlx-lm model class, run for the layers [start, end)
layers         where a model keeps its layers, stand-ins for them, their arguments as trees
structure      how a model is made: its layers, its caches, what crosses between layers
graph          which tensors a stage really reads, asked of MLX's own graph
loader         survey -> fit -> download -> load, for one stage
caches         caches for own and foreign positions; the sliding window in temporal order
kv_pool        every sequence's caches on this stage
tensors        arrays to raw buffers and back
codecs         rows of hidden states in fewer bytes, and back
hidden_states  a step's rows as the parts of a frame, and from them
memory         what is needed and what is free; MLX's limits
"""
