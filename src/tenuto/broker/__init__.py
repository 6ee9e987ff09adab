"""Hints between processes: "something may be there". A lost hint costs one poll interval.

protocol: the port.
memory: within one process.
local: between processes of one machine that share a SQLite file.
postgres: LISTEN/NOTIFY.
"""
