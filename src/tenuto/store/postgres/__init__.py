"""PostgreSQL, over asyncpg.

store: the store; every query is one statement, every batch one round trip.
pool: connections, lent first come, first served.
clock: the database's clock, carried forward between readings.
connector: finds the primary among the hosts of an address.
address: parses addresses.
sessions: settings at the start of connections and transactions.
roles: checks the role of a connection.
pooler: checks PgBouncer in transaction mode.
errors: maps errors of the driver.
admin: creates and drops databases for tests and chaos runs.
"""
