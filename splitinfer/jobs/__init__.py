"""Jobs in processes of their own, each with a limit: whatever ends one is a finding, and the others go on.

job        a job, and how jobs share the time; pure
child      runs a job's process and collects what it reports
process    what that process does: it calls the job's ``measure``; ``output``: where its answers go
"""
