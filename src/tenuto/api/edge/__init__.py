"""HTTP below the routes: connections, bodies, errors, streams, metrics.

connection, connection_limits: bounds on connections and slow clients.
forwarded: client addresses behind proxies.
request_body: authenticates, then reads a body up to its limit.
json_checks: refuses invalid JSON and duplicate names.
body_budget: bounds the memory of large bodies.
concurrent: bounds open streams and waiting claims per token and workspace.
rotation: a fair queue that serves its holders in rotation.
idempotency: stores responses by `Idempotency-Key`.
problems: errors as problem details (RFC 9457).
middleware: security headers, and request bodies that no handler read.
metrics: `/metrics`, request ids and the access log.
event_hub: reads events once for all live streams.
long_poll: claims that wait for a task.
openapi: the OpenAPI document.
"""
