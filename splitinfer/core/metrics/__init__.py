"""Measurements as values: records of steps and requests, gaps of stages, histograms, speeds of links."""
