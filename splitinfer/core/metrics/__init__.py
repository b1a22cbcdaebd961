"""Measurements as values: gaps of stages, offsets of clocks, histograms of durations, speeds of links."""
