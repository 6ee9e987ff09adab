"""Coordinators repair and promote. Any number may run; one leads, to save duplicate work.

coordinator: the duties, and the cycle that runs them.
dispatch: starts sessions of push agents through gateways.
gateway: the HTTP client of one gateway.
rate: limits session starts per second.
outage: retries and alerts while the store is away.
resume: spares leases after the machine or the store was suspended.
"""
