"""`orchestrate task`, `run` and `dlq`.

group: the command group. create, run: submit tasks. read: list, show, logs, explain.
control: cancel, retry, pause. tree: a task with its subtasks. follow: progress of a watched task.
dlq: tasks that used up their tries.
"""
