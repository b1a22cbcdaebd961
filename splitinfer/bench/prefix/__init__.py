"""``splitinfer bench --mode prefix``: what the prefix cache is worth, in memory and on disk."""
