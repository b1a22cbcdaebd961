"""Simulates a pipeline: the live scheduler in virtual time, also for machines that one does not have. Pure."""
