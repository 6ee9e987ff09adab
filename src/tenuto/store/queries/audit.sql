-- Reads of a whole database, for consistency checks after injected faults.

-- name: audit_tasks
-- Returns the next tasks by id, with their outcome and the number of completed attempts.
-- params: after uuid, most bigint
select task.id, task.status, task.attempt, task.tries, task.max_attempts, task.lease_until,
  body.idempotency_key as key, task_output.output,
  (select count(*) from attempt where attempt.task = task.id
    and attempt.outcome = 'COMPLETED') as completed,
  (select max(attempt.attempt) from attempt where attempt.task = task.id
    and attempt.outcome = 'COMPLETED') as completed_by
from task join task_body body on body.workspace = task.workspace and body.task = task.id
left join task_output on task_output.task = task.id
where task.id > :after order by task.id limit :most;

-- name: audit_transitions
-- Returns every pair of statuses between which tasks changed, and how often.
select previous, new, count(*) as n from event
where previous is not null and new is not null and exists (
  select 1 from task where task.id = event.task)
group by previous, new;

-- name: audit_lost_leases
-- Returns how many attempts lost their lease.
select count(*) as n from attempt where outcome = 'STALLED';

-- name: audit_unfinished
-- Returns how many tasks are not finished.
select count(*) as n from task
where status not in {terminal};

-- name: cursor_position
-- Returns the position up to which a subscriber has read.
-- params: name text
select xid, position from cursor where name = :name;
