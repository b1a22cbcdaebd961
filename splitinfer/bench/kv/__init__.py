"""``splitinfer bench --mode kv``: quantised KV."""
