"""Links between stages: their transport, their measurement, their codec."""
