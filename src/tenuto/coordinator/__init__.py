"""Coordinators repair and promote. Any number can run; one leads, to avoid duplicate work.

coordinator: the duties, and the cycle that runs them.
dispatch: starts sessions of push agents through gateways.
gateway: the HTTP client of one gateway.
rate: limits session starts per second.
outage: retry delays and alerts while the store is unavailable.
resume: exempts leases after the machine or the store was suspended.
"""
