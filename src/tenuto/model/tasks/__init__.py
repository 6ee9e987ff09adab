"""Tasks: the row, the commands, and the pure functions that decide every transition.

task: the row, its statuses and the table of legal transitions.
fields: what the program knows of a field of a task, written once beside the field.
submission: the request for a new task and its validation.
commands: the commands that change a task.
decide: applies one command to a task and returns the change.
attempts: transitions made by attempts, leases and timers.
user_commands: transitions made by users and rules.
changes: helpers that build a change with its audit event.
retry: retry policies, error classes and backoff.
environment: which environment variables and working folder a task may set for its command.
fingerprint: hashes that recognise a repeated submit.
transcript: lines of an attempt's log, and its size limit.
"""
