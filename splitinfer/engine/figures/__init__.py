"""What the coordinator counts: steps, totals, health, and a trace of every step."""
