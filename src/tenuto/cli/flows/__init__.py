"""Flows, groups, definitions, schedules, triggers and the inbox.

flows, groups, schedules, triggers, inbox: the commands of these names.
manifest: apply, validate, export, definition. flow_tree: draws a flow as a tree.
"""
