"""This machine's operating system, as far as a running stage has to do with it: staying awake, being scheduled, memory.

command         runs one of the system's commands to its end
apple           where macOS's libraries are, and what its commands print
keep_awake      prevents sleep while there is work
qos             the quality of service of a thread
free_memory     how many bytes a stage may take: pages that macOS counts; elsewhere what psutil calls available
ledger          publishes this process's claim of memory, and reads those of the others
interface_kind  whether an interface is Thunderbolt, a cable, Wi-Fi ... Pure
interfaces      those that are up
processes       those of this machine, and which of them are splitinfer's
origin          how this process was started, which decides what macOS lets it do

Everything that is Apple's is in these few files, and nothing above imports ctypes for it. On other systems it does
nothing, or asks psutil. No failure here is an error: a machine that cannot be kept awake still computes.
"""
