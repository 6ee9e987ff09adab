"""Limits that keep a ready task from being claimed, and limits on the cost of tasks.

pauses: which lanes and agents a pause stops.
rate_limits: requests and tokens per minute, shared by all workers.
concurrency: concurrency keys; each allows a number of active tasks.
budgets: tokens and cost that attempts used, and budgets for them.
quota: limits of a workspace.
complexity: complexity levels of tasks, and the agents that a complex task needs.
"""
