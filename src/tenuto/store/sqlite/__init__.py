"""SQLite: one file, one writer, parallel readers.

store: the store.
connection: one connection, with its prepared queries.
tenant: restricts every statement to one workspace.
"""
