"""The device that computes a stage's steps. A launch of arrays returns a ticket; waiting for it gives the span."""
