"""The truth. One SQL text (`queries/`) and one schema for SQLite and PostgreSQL."""
