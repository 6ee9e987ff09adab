"""The database: the only truth. One SQL text and one schema for SQLite and PostgreSQL.

protocol: what the engine asks of a store.
sql: reads `queries/` and renders each query for one database.
schema: migrations, and whether program and database fit.
batching: group commit.
sqlite, postgres: the two stores.
queries: all SQL, one file per capability. migrations: the schema, step by step.
"""
