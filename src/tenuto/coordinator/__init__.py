"""Coordinators repair and promote. Any number can run; one leads, to avoid duplicate work.

coordinator: election of the leader, and the cycle that runs the duties.
duties: the table of the duties, and their functions.
dispatch: starts sessions of push agents through gateways.
gateway: the HTTP client of one gateway.
rate: limits session starts per second.
outage: retry delays and alerts while the store is unavailable.
resume: exempts leases after the machine or the store was suspended.
"""
