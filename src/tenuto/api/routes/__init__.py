"""Routes, one file per capability.

tasks, groups, flows, definitions, schedules, triggers, inbox, mailbox, agents, limits, complexity,
accounts (with secrets and webhooks), operations: as their names say.
agent_protocol: claim, report and heartbeat of agents over HTTP.
worker_protocol: the other calls of remote workers.
streams: server-sent events.
bodies, flow_bodies: request bodies.
"""
