"""`orchestrate chaos`: a deployment of real processes under faults, and a check of what is left.

run: one run. plan: its settings. deployment: its processes. databases, server: its database.
faults: injects faults. proxy: cuts connections at a commit.
client: submits tasks. handlers: what the tasks do. recorder: records what witnesses saw.
checker: the verdict. report: prints it.
"""
