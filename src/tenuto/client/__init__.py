"""The Python client: uses a server over HTTP, or a database directly.

client: `Client` and `AsyncClient`.
blocking: the same resources with blocking methods; generated.
background_loop: an event loop in a thread.
tasks, flows, agents, accounts: the resources of `AsyncClient`.
worker: `Worker`, which runs handler functions marked by decorators.
paging: reads lists page by page.
follow: yields the events of a task until it finishes.
target: finds the server or database to use; stores logins.
remote: the engine's methods over HTTP.
"""
