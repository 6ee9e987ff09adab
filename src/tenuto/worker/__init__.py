"""Hosts agents: claims for them, runs attempts, renews leases, kills what must end."""
