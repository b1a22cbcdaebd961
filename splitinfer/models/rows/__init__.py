"""Computes a step's rows of many sequences, and tries which ways of doing so are right."""
