"""Machines as they were measured: seconds of layers and links, bytes that are free. Pure.

profile         what was measured of machines, links and a model, from which layouts are planned
costs           seconds of a step by its rows, and by what they attend to; how numbers are checked, written and read
selection       which machine this process emulates
"""
