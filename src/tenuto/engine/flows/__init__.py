"""Flows: runs of definitions. Each finished task is followed up in its own transaction.

definitions: stores definitions; applies YAML files.
start: starts and controls flows; runs their deferred work.
plans: caches the plans of flows.
advance: writes all follow-ups of finished tasks in one transaction (`Cascade`).
outcomes: pure rules of what one finished task leads to.
activation: creates tasks and group runs inside a flow.
activation_rows: builds the rows of an activation.
added_children: starts children that were added to a group before its turn.
chains: completes a task and activates its successor in one statement.
routing: finds the successor of a task, and asks for approvals.
inputs: builds the input of a claimed task.
deferred: work that a cascade left for a later transaction.
repair: finds cycles and wrong counters.
rows: maps rows of flows and groups.
views: reads flows and groups.
graph: draws a flow as a graph.
"""
