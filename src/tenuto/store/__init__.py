"""The database, the only source of truth. One SQL text and one schema for SQLite and PostgreSQL.

protocol: the interface that the engine uses.
sql: reads `queries/` and renders each query for one database.
schema: migrations, and the check that program and database versions fit.
batching: group commit.
sqlite, postgres: the two implementations.
queries: all SQL, one file per capability. migrations: the schema, step by step.
"""
