"""The truth. One SQL text (`queries.sql`) and one schema for SQLite and PostgreSQL."""
