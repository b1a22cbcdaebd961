"""``scripts/on_gpu``: what only a GPU can show, as probes in processes of their own and one JSON document."""
