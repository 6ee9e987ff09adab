"""Webhooks: signed messages about events to URLs of a workspace.

endpoints: creates, changes and deletes webhooks.
deliveries: turns events into messages, and records each attempt to send one.
"""
