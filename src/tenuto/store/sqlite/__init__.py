"""SQLite: one file, one writer, readers beside it.

store: the store.
connection: one connection, with its prepared queries.
tenant: limits every statement to one workspace.
"""
