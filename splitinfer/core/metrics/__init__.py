"""Measurements as values: records of steps and requests, gaps of stages, histograms, clocks, speeds of links."""
