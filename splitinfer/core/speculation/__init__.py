"""Drafts in flight: how many, for whom, and whether they pay."""
