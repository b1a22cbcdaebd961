"""What is wrong with this machine, from what its commands print. Pure: each module turns a ``Seen`` into findings.

A module emits a finding for what a person may want to change, and nothing for what is right. RDMA is a list of
requirements instead, which are shown where one is missing.
"""
