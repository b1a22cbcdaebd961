"""Describes machines by their measurements: seconds of layers and links, free bytes. Pure.

profile         the measurements of machines, links and a model, for planning layouts
costs           seconds of a step by its rows and the positions that they attend to; numbers checked, written and read
selection       the machine that this process emulates
"""
