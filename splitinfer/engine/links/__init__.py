"""Links between stages: their transport, keys, and measurement, and what goes over them."""
