"""``splitinfer bench --mode serve``: policies and objectives, while requests arrive."""
