-- What is left of a database under faults, for who checks it from outside.

-- name: proof_tasks
-- The next tasks by id, with what their end says and how many attempts were completed.
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

-- name: proof_moves
-- Every pair of statuses that tasks went between, and how often.
select previous, new, count(*) as n from event
where previous is not null and new is not null and exists (
  select 1 from task where task.id = event.task)
group by previous, new;

-- name: proof_stalls
-- How many attempts lost their lease.
select count(*) as n from attempt where outcome = 'STALLED';

-- name: proof_open
-- How many tasks have not ended.
select count(*) as n from task
where status not in ('COMPLETED', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED');

-- name: cursor_place
-- How far a subscriber has read.
-- params: name text
select xid, position from cursor where name = :name;
