"""Tasks: the row, the commands, and the pure functions that decide every transition.

task: the row, its statuses and the table of legal transitions.
submission: the request for a new task and its validation.
commands: what can be asked of a task.
decide: applies one command to a task and returns the change.
attempts: transitions made by attempts, leases and timers.
user_commands: transitions made by users and rules.
changes: helpers that build a change with its audit event.
retry: retry policies, error classes and backoff.
environment: which variables and folder a task's command may use.
fingerprint: recognises a repeated submit.
transcript: size limits of an attempt's log.
"""
