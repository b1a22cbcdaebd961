"""Anthropic's API: what clients ask, as `Ask`s, and answers, as its messages and streams."""
