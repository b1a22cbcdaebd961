"""The coordinator's figures: records of steps, totals, health, and a trace of every step."""
