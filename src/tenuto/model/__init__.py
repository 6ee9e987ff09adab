"""Data types and decisions without I/O: no clock, no database, no imports from other parts.

Each capability has a folder. The folder has the same name here, in `engine` and in most other
parts.

tasks: task rows, commands, and the decisions about their transitions.
agents: matching of tasks and agents, agent statuses, messages.
flows: definitions, plans, and the rules that decide what runs next.
limits: pauses, rate limits, concurrency keys, budgets, quotas, complexity.
schedules: the times of schedules, and event names.
tenancy: permissions and secrets.
bounds: limits on inputs, and the functions that check them.
errors: every exception that a caller can see, with its stable code.
printable: escapes untrusted text for terminals and logs.
webhooks: event filters, retry delays and the circuit breaker of webhooks.
"""
