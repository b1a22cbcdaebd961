"""Where to cut: profiles and aims in, layouts out. Pure: nothing is measured, loaded or written here.

    profiles ──cuts──▶ every cut and order ──memory──▶ those that fit ──formulas──▶ the best of each aim ──▶ a layout

asked       what the layout is for, and the margins
cuts        cuts and orders of machines, all of them or on a grid
memory      whether a cut fits, the longest context, and what is lacking
formulas    the figures of a cut
plan        the best cut for each aim
comparison  this machine alone beside the best cuts: a table, and one sentence
document    a plan in sentences, as a layout file, and as plain numbers
"""
