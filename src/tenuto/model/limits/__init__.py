"""Everything that keeps a ready task from being claimed, and what tasks may cost.

pauses: which lanes and agents a pause stops.
rate_limits: requests and tokens per minute that all workers share.
concurrency: concurrency keys, of which each admits a number of tasks at a time.
budgets: usage of models, and budgets for it.
quota: limits of a workspace.
complexity: how complex a task is, and which agents that requires.
"""
