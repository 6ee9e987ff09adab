"""Hints between processes: "look for work now". A lost hint costs one poll interval.

protocol: the interface.
memory: within one process.
local: between processes of one machine that share a SQLite file.
postgres: LISTEN/NOTIFY.

`registry.BROKERS` lists them; installed packages can add others.
"""
