"""The engine's calls over HTTP: same names, results and errors.

engine: tasks and everything of the files below.
worker: claim, report and heartbeat.
flows, schedules, definitions, limits, mailbox: their capabilities.
http: one server, with retries and deadlines.
bodies: request bodies.
errors: maps responses to exceptions.
"""
