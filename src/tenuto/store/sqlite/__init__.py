"""SQLite: one file, one writer, parallel readers.

store: the store, and the store of one tenant, which restricts every statement to a workspace.
connection: one connection, with its prepared queries.
"""
