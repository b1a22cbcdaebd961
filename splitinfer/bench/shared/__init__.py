"""What the modes of the benchmark share: baselines, processes, workloads, arithmetic of measurements."""
