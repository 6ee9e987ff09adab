"""Workers: host agents, claim tasks for them, run attempts, renew leases, kill sessions.

worker: the claim loop.
attempt: runs one attempt until its outcome is stored.
context: the object that a handler receives.
handler_waits: types for handlers that wait for subtasks or people.
heartbeat: renews leases; delivers cancel and pause requests.
leases: the leases that this worker holds.
capacity: limits sessions to the number that this machine can start.
transcript: buffers and stores an attempt's log lines.
retry_store: retry delays while the store is unavailable.
engine_protocol: the engine calls that a worker uses.
process_pool: restarts worker processes that exit.
session: starts commands under the supervisor.
supervisor: a program that kills whole process trees.
runtime: runs an attempt as a handler or as a command.
"""
