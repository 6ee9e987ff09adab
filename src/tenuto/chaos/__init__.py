"""`orchestrate chaos`: injects faults into a deployment of real processes and checks the result.

run: one run. plan: its settings. deployment: its processes. databases, server: its database.
faults: injects faults. proxy: drops the response to a commit.
client: submits tasks. handlers: task handlers. recorder: records what clients and tasks saw.
checker: checks the invariants. report: prints the result.
"""
