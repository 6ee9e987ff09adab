"""Everything that keeps a ready task from being claimed, and what tasks may cost.

pauses: stores pauses.
rate_limits: claims within rate limits, and charges tokens.
concurrency: gives places of concurrency keys to tasks, in order.
budgets: records usage, and enforces budgets.
quotas: the quota of running tasks, for `explain`.
pending_quota: the quota of tasks that wait to run.
complexity: complexity levels of a workspace.
"""
