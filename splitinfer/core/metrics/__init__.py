"""What was measured, as values: gaps, clocks, durations, links."""
