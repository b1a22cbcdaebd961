"""The live scheduler in virtual time: what a pipeline would do, in seconds and for machines one does not have. Pure."""
