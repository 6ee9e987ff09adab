"""Schedules, events and triggers: flows that start by time or after an event.

schedules: creates, changes, pauses and deletes schedules.
triggers: creates, changes, pauses and deletes triggers.
rules: the life cycle that schedules and triggers share.
events: publishes custom events of users and programs.
firing: starts the flows of due schedules.
event_matching: starts the flows of triggers that match an event.
manifest_rules: stores the schedules and triggers of YAML files.
rows: maps rows of schedules, and builds their writes.
"""
