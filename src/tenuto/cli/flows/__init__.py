"""Commands for flows, groups, definitions, schedules, triggers and the inbox.

flows, groups, schedules, triggers, inbox: the commands of these names.
manifest: apply, validate, export, definition. flow_tree: prints a flow as a tree.
"""
