"""``splitinfer bench --mode speed``: one stream, prompts, and many sequences, beside plain mlx-lm."""
