"""PostgreSQL, over asyncpg.

store: the store; every query is one statement, every batch one round trip.
pool: a few connections, in order of demand.
connector: finds the primary among the hosts of an address.
address: parses addresses.
sessions: how connections and transactions begin.
roles: which role a connection acts as.
pooler: rules behind PgBouncer in transaction mode.
errors: maps errors of the driver.
admin: creates and drops databases for tests and chaos runs.
"""
