"""Links between stages: their transport, keys, messages and measurement."""
