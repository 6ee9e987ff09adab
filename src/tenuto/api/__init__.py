"""The HTTP API: `/api/v1`, health, metrics and live streams. The engine decides.

app: the application with all routes.
server: serves the application.
service: what all requests share: store, engines, caches.
routes: one file per capability. auth: who may call which route. edge: everything else of HTTP.
"""
