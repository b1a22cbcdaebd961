"""Parses the output of the system's commands, a module for each group of tools.

Nothing here raises: what cannot be parsed is ``None``, or is left out.
"""
