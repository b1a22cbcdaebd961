"""Measures profiles of machines and links for one model. Layouts are planned from them (``machine.profile``)."""
