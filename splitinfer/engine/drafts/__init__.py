"""Drafters: they propose the next tokens, on the coordinator."""
