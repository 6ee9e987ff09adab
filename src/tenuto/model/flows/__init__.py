"""Flows: definitions, plans, and the pure rules that decide what runs next.

definition: reusable tasks and groups, and the control tasks that steer a flow.
plan: all definitions that a flow can reach, checked as a whole.
progress: what runs next, and how groups finish.
expressions: conditions in CEL.
"""
