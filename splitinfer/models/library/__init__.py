"""mlx-lm's and mlx-vlm's models as they are: imported lightly, their layers, and the graph of arrays."""
