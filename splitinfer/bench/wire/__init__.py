"""``splitinfer bench --mode wire``: hidden states in few bytes."""
