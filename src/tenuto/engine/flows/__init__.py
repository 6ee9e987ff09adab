"""Flows: executions of definitions. All follow-ups of a finished task are one transaction.

definitions: stores definitions; applies YAML files.
start: starts, pauses, resumes and cancels flows and groups; runs deferred work.
plans: caches the plans of flows.
advance: writes all follow-ups of finished tasks in one transaction (`Cascade`).
groups: starts groups, finishes them when their join decides (`model/flows/groups.py`), stops them.
outcomes: pure rules: what one finished task or group leads to.
activation: creates tasks and group runs inside a flow.
activation_rows: builds the rows of an activation, without reading or writing.
added_children: starts children that were added to a group before the group started.
chains: completes a task and activates its successor in one statement.
routing: finds the successor of a task; asks for approvals.
inputs: builds the input of a claimed task.
deferred: runs work that a cascade deferred to a later transaction (`flow_work` rows).
repair: fails cyclic dependencies and corrects wrong counters.
rows: maps rows to flows and groups; builds the statements that write them.
views: reads flows and groups.
graph: builds the graph of a flow; renders it as Mermaid.
"""
