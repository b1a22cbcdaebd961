"""``splitinfer bench --mode exact``: the first token at which two roads part."""
