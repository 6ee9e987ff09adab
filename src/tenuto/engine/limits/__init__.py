"""Limits: pauses, rate limits, concurrency keys, budgets and quotas.

pauses: stores the pauses of a workspace.
rate_limits: claims tasks within rate limits; charges tokens.
concurrency: grants and releases the permits of concurrency keys.
budgets: records token usage and cost; enforces budgets.
quotas: explains when the quota of running tasks is used up.
pending_quota: enforces the quota of pending tasks.
complexity: stores the complexity rules of a workspace.
"""
