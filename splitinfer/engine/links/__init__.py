"""Links between stages: their transport, keys, measurement and codec, and what goes over them."""
