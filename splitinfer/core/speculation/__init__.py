"""Speculation in flight: how many drafts, for which sequences, and whether they pay."""
