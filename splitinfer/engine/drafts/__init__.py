"""Drafters: whoever guesses the next tokens, on the coordinator."""
