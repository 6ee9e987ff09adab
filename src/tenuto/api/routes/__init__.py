"""Route handlers, one file per capability.

tasks, groups, flows, definitions, schedules, triggers, inbox, mailbox, agents, complexity: each
serves the resource of its name.
limits: pauses and rate limits.
accounts: logins, workspaces, users, tokens, secrets and webhooks.
operations: health, statistics, workers and the coordinator.
agent_protocol: claims, reports and heartbeats of agents and workers.
worker_protocol: the other calls of remote workers, such as checkpoints, steps and subtasks.
streams: server-sent events.
bodies, task_bodies, flow_bodies: request bodies.
task_filter: the filter of tasks, as a body and as query parameters.
"""
