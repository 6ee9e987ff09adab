"""The database, the only source of truth. One SQL text and one schema for SQLite and PostgreSQL.

protocol: the interface that the engine uses.
sql: reads `queries/` and renders each query for one database.
dialects: the SQL texts that differ between the databases.
task_columns: the columns of new tasks, from the field table of a task.
schema: migrations, and the check that program and database versions fit.
batching: group commit.
sqlite, postgres: the two implementations.
queries: all SQL, one file per capability. migrations: the schema, step by step.
"""
