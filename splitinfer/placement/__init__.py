"""Chooses where to cut: profiles and aims in, layouts out. Pure: nothing is measured, loaded or written here.

profiles ──cuts──▶ every cut and order ──memory──▶ fitting cuts ──formulas──▶ the best of each aim ──▶ a layout
"""
