#!/usr/bin/env bash
# mlx 0.32.4: mx.load is lazy and safetensors' format has F64, but one tensor in F64 (a table of rotary frequencies, say) makes
# it refuse the whole file. MLX itself has float64 on the CPU, and writes it.
source "$(dirname "$0")/_python" "mlx[cpu]==0.32.4" numpy==2.3.5
cd "$folder" && bin/python - <<'PYTHON'
import json, struct, sys
import mlx.core as mx
import numpy as np


def written(kind, array):
    """A file in the format of safetensors with one tensor of float32 and one of another kind."""
    first, other = np.ones(2, np.float32).tobytes(), array.tobytes()
    header = json.dumps({
        "usual": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "other": {"dtype": kind, "shape": [2], "data_offsets": [8, 8 + len(other)]},
    }).encode()
    with open("model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + first + other)
    try:
        return sorted(mx.load("model.safetensors"))
    except RuntimeError as error:
        return str(error)


seen = {"F16": written("F16", np.ones(2, np.float16)), "F64": written("F64", np.ones(2, np.float64))}
print(f"expected: ['other', 'usual'] from both\nseen:     {seen}")
sys.exit(seen["F16"] != ["other", "usual"] or not isinstance(seen["F64"], str))
PYTHON
