"""The HTTP API: `/api/v1`, health, metrics and live streams. Decisions are made by the engine.

app: the ASGI application with all routes.
server: serves the application over HTTP.
service: objects shared by all requests: store, engines, caches.
operation: declares a route beside its handler: method, path and the access it needs.
routes: one file per capability.
auth: authentication, and the role that each route needs.
edge: connections, bodies, errors, streams and metrics.
"""
