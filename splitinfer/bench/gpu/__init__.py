"""What a GPU could show, in some minutes: ``scripts/on_gpu``. Independent parts, one JSON document.

parts          the parts and their jobs (``splitinfer.jobs``); pure
sizes          how large the models are, by what computes
run            runs the jobs one after the other, and collects what they report

about          what computes
support        architectures whole and cut
launch         the share of a step that a launch takes
groups         groups of sequences on two stages, launching ahead or not
rows           errors of rows together against one by one; what the trials at loading decide
commands       other modes of the benchmark, on a random model
send           from the end of a step until its results are ready to be sent
demo           a larger demo pair, trained for a short time
"""
