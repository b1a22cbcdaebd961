"""Cuts a model, loads a part of it and holds its caches: everything that touches MLX and knows mlx-lm.

checkpoint         what a model folder holds, read from the headers alone; its fingerprint
hub                "demo", a local folder or a hub id -> a checkpoint; downloads only what is needed
generation_config  the sampling values and end tokens that a model folder recommends
light_imports      modules of mlx-lm and mlx-vlm without what a stage does not need
mlx_lm             what is used of mlx-lm
mlx_vlm            models with mlx-vlm's classes, where it is installed
cut                one mlx-lm model class, run for the layers [start, end)
pictures           a picture's rows on the first stage, made by the model's own tower
stand_ins          what is done in the place of layers, or besides calling them
layers             where a model keeps its layers, stand-ins for them, their arguments as trees
structure          a model's layers, its caches, and what crosses between layers
graph              which tensors a stage reads, from MLX's own graph
loader             survey -> fit -> fetch -> load, for one stage
step               one step of many sequences, in the best way that the model allows
step_trial         whether a way to run a step is right: small steps, together and one sequence at a time
layer_trace        two runs of a stage, compared layer by layer
rounding           whether errors are rounding
rows               the tokens of many sequences as rows of one batch
cohort             KV of sequences that decode together, side by side
caches             caches of own layers and of other stages' layers; the sliding window in temporal order
growing            appending to arrays with room to grow; a plain KV cache
quantised          a KV cache in few bits, and attention over it
kv_pool            every sequence's caches on this stage, and stored blocks
kv_blocks          blocks of KV, cut from caches and joined into new ones
packed_tree        the arrays of a tree in one, byte by byte
heads              drafters on the last stage: what the kinds of them have in common
with_heads         how they run
mtp                the prediction heads of a checkpoint
taps               hidden states of several layers in one row, and what drafters that read them have in common
eagle3             an EAGLE-3 drafter
dflash             a DFlash or DFlash2 drafter
trained            which of these a drafter is, and what each stage has of it
rollback           rolling states back to any row of a block of drafts
rollback_trial     how states can be rolled back, tried when a stage is loaded
kv_trial           whether sequences can start from stored blocks, tried when a stage is loaded
tensors            arrays to raw buffers and back
codecs             rows of hidden states in fewer bytes, and back
hidden_states      a step's rows as the parts of a frame, and back
batch_invariance   whether a row's result depends on the number of rows
openblas           faster products for few rows, where OpenBLAS computes them
memory             what a stage needs and what is free; MLX's limits
"""
