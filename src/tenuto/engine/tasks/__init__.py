"""Tasks: from submit to result, and what users and coordinators do with them.

submit: validates and inserts new tasks.
claim: claims tasks for an agent.
report: renews leases by heartbeats; progress, checkpoints and log lines of attempts.
finish: stores the outcome of an attempt.
control: cancel, retry, pause and other actions by id or filter.
edit: changes and deletes tasks.
retry: retries finished tasks, with their group and flow.
dependencies: dependencies of newly submitted tasks.
references: checks that tasks and agents named by a new task exist.
query: lists and reads tasks.
explain: explains why a task is not running.
maintenance: expires leases, promotes due tasks, archives, prunes, relays events, elects the leader.
"""
