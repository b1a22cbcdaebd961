"""Where to cut: profiles and aims in, layouts out. Pure: nothing is measured, loaded or written here.

    profiles ──cuts──▶ every cut and order ──memory──▶ those that fit ──screen──▶ the best few of each aim
                                                                                     │ simulate
                            layout with comments ◀──words── the best of each aim ◀───┘

asked       what the layout is for, and the margins
cuts        cuts and orders of machines, all of them or on a grid
memory      whether a cut fits, the longest context, and what is lacking
pipeline    a cut of profiled machines as a machine to simulate
screen      formulas: the figures of a cut in microseconds
simulate    the live scheduler on a cut, in virtual time
plan        the best cut for each aim
words       why a cut is the best, and what is lacking, in sentences
document    a plan as a layout file, and as plain numbers
"""
