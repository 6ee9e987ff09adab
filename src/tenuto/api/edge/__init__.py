"""HTTP below the routes: connections, bodies, errors, streams, metrics.

connection, connection_limits: bounds on connections and slow clients.
forwarded: client addresses behind proxies.
request_body: authenticates, then reads a body up to its limit.
json_checks: refuses ambiguous JSON.
body_budget: memory for large bodies.
concurrent: bounds streams and waiting claims.
rotation: serves holders in rotation.
idempotency: stores responses by `Idempotency-Key`.
problems: errors as problem details (RFC 9457).
middleware: security headers, and bodies that no handler read.
metrics: `/metrics`, request ids and the access log.
event_hub: reads events once for all live streams.
long_poll: claims that wait for a task.
openapi: the OpenAPI document.
"""
