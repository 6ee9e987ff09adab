"""`orchestrate task`, `run` and `dlq`.

group: the command group. fields: options and output of a task's fields. create, run: submit tasks.
read: list, show, status, logs, attempts, explain. control: cancel, retry, pause, update and other
changes. tree: a task with its subtasks. follow: shows a task live for `--follow`. dlq: dead-letter
tasks.
"""
