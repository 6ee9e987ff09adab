"""Agents: which agent can run which task, agent statuses, and messages to agents.

matching: a task's requirements, lanes, and agent profiles.
lifecycle: agent statuses over time, and merging of profiles.
messages: messages for an agent's mailbox.
"""
