"""Flows: definitions, plans, and the pure rules of what runs next.

definition: reusable tasks and groups, and the controls that connect them.
plan: all definitions that a flow can reach, checked as a whole.
progress: what runs next, and how groups finish.
expressions: conditions in CEL.
"""
