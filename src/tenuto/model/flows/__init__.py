"""Flows: definitions, plans, and the pure rules that decide what runs next.

definition: reusable tasks and groups, and the control tasks that steer a flow.
plan: all definitions that a flow can reach, checked as a whole.
groups: runs of groups, and how `join` decides their outcome.
progress: what runs next when a part of a flow finishes.
expressions: conditions in CEL.
"""
