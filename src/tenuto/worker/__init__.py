"""Workers: host agents, claim tasks for them, run attempts, renew leases, kill sessions.

worker: the claim loop.
attempt: runs one attempt until its outcome is stored.
context: what a handler receives.
handler_waits: waits of handlers for subtasks and people.
heartbeat: renews leases; delivers cancel and pause requests.
leases: the leases that this worker holds.
capacity: how many sessions this machine can start.
transcript: buffers an attempt's log lines.
retry_store: delays while the store is away.
engine_protocol: the engine calls that a worker uses.
process_pool: starts worker processes again when they die.
session: starts commands under the supervisor.
supervisor: a program that kills whole process trees.
runtime: how an attempt runs: handler or command.
"""
