"""Shared by the modes of the benchmark: systems, processes, workloads, and the arithmetic of measurements."""
