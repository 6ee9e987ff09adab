"""The Python client, over HTTP or on a database.

client: `Client` and `AsyncClient`.
blocking, blocking_agents: the blocking forms of the resources.
background_loop: an event loop in a thread.
tasks, flows, agents, accounts: the resources.
worker: workers in a program: handlers by decorator.
follow: watches a task until it finishes.
target: which server or database to use.
remote: the engine's calls over HTTP.
"""
