"""``splitinfer bench --mode kv``: KV in few bits."""
