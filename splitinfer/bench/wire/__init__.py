"""``splitinfer bench --mode wire``: codecs for hidden states."""
