"""The engine's methods over HTTP: same names, results and errors.

generated: the methods that are one request; written by `docs/generate.py`.
engine: `RemoteEngine`: tasks, and access to the classes of the files below.
worker: the methods of workers: claim, report and heartbeat.
flows, schedules, definitions, limits, mailbox: the methods of one capability each.
resource: the base of all these; each call sends one request.
http: sends requests to one server, with retries and deadlines.
bodies: builds request bodies.
errors: maps error responses to exceptions.
"""
