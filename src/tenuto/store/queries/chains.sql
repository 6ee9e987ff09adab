-- Chained completions: one statement writes a completion and everything that follows from it. Each
-- query does so only in the plain case, and otherwise nothing: its first step finds and locks the
-- rows, in the lock order of a cascade, and the other steps use what it found.
--
-- A lock returns a row as it is now, but the statement's other reads see the state of its start. So
-- rows whose changes would show that another transaction interfered must be unchanged since then.

-- fragment: can_complete
-- The attempt owns the task and can complete it, and the task is watched.
task.id = :id and task.workspace = :workspace and task.attempt = :attempt and task.lease_token = :token and task.watched
  and {fragment:no_request_pending}

-- fragment: done_if_ready
-- Completes the task if the step `ready` found a row.
{fragment:complete_update}
where task.id = :id and task.workspace = :workspace and (select count(ready.id) from {ready}) > 0
returning {fragment:complete_columns}

-- fragment: unblocked only postgres
{woken} as moved

-- fragment: unblocked only sqlite
json_each({places:woken}) as at cross join task as moved on moved.{place} = at.value

-- fragment: record_unblocked
-- The audit rows of tasks that the step `woken` made PENDING.
{fragment:ready_event}
from {fragment:unblocked}
where moved.status = 'PENDING'

-- fragment: awaiting only postgres
select awake.id, mine.awaited
from (
  select task.awaited from task
  where {fragment:can_complete} and task.awaited between 1 and 8
    and task.{place} = (select seen.{place} from task seen where seen.id = :id)
  for update
) mine
cross join lateral (
  select d.task from task_dependency d
  where d.needs = :id and not d.met and not d.failed and mine.awaited > 0
  order by d.task limit 9
) pair
cross join lateral (
  select task.id from task where task.id = pair.task and {fragment:waits_for_tasks_only} offset 0 for update
) awake

-- fragment: awaiting only sqlite
select task.id, mine.awaited
from (select task.awaited from task where {fragment:can_complete} and task.awaited between 1 and 8) mine
cross join task_dependency d on d.needs = :id and not d.met and not d.failed {own:d}
cross join task on task.id = d.task and {fragment:waits_for_tasks_only}
order by task.id limit 9

-- name: complete_and_unblock
-- Completes an attempt of a task on which a few tasks depend that wait for other tasks only, and
-- decrements their unmet dependencies; those without any become claimable.
-- params: id uuid, attempt bigint, token text, workspace uuid, now timestamptz, actor text
-- rows: result(task uuid, workspace uuid, output json, summary text)
-- as: waiter(id, awaited)
{fragment:awaiting};
-- as: ready(id)
select counted.id from (
  select waiter.id, waiter.awaited, count(*) over () as n from {waiter}
) counted where counted.n = counted.awaited;
-- as: moved
{fragment:done_if_ready};
{fragment:attempt_completed};
{fragment:record_completed};
{fragment:store_result};
update task_dependency set met = true
where task_dependency.needs = :id and task_dependency.workspace = :workspace
  and (select count(ready.id) from {ready}) > 0;
-- as: woken
update task set unmet = task.unmet - 1, updated_at = :now,
  version = task.version + case when task.unmet = 1 then 1 else 0 end,
  status = case when task.unmet = 1 then 'PENDING' else task.status end,
  event_xid = {fragment:event_xid}
where task.id in (select ready.id from {ready}) {own:task}
returning {fragment:unblocked_columns};
{fragment:record_unblocked};
-- answer: woken(id, status, lane)

-- fragment: in_turn only postgres
select awake.id, child.slot
from (
  select task.workspace from task where {fragment:can_complete} and task.awaited = 0 for update
) mine
cross join lateral (
  select task_group.id from task_group
  where task_group.id = :parent and task_group.workspace = mine.workspace
    and task_group.status = 'RUNNING' and task_group.kind = 'sequential'
    and task_group.turn = :slot and task_group.open > 1 and task_group.failed = 0
    and task_group.join_policy <> 'first_succeeded'
    and task_group.{place} = (select seen.{place} from task_group seen where seen.id = :parent)
  offset 0 for update
) held
cross join lateral ({fragment:next_child}) child
cross join lateral (
  select task.id from task
  where task.id = child.id and task.workspace = mine.workspace and held.id = :parent
    and {fragment:waits_for_turn}
  offset 0 for update
) awake
where child.is_group = 0

-- fragment: in_turn only sqlite
select task.id, child.slot
from ({fragment:next_child}) child join task on task.id = child.id
where child.is_group = 0 and {fragment:waits_for_turn} {own:task}
  and exists (select 1 from task_group
    where task_group.id = :parent and task_group.workspace = :workspace
      and task_group.status = 'RUNNING'
      and task_group.kind = 'sequential' and task_group.turn = :slot and task_group.open > 1
      and task_group.failed = 0 and task_group.join_policy <> 'first_succeeded')
  and exists (select 1 from task where {fragment:can_complete} and task.awaited = 0)

-- name: complete_and_pass_turn
-- Completes an attempt in a sequence on which no other task depends, and gives the turn to the next
-- child, if that is a task that waits only for its turn.
-- params: id uuid, attempt bigint, token text, workspace uuid, parent uuid, slot bigint, now timestamptz, actor text
-- rows: result(task uuid, workspace uuid, output json, summary text)
-- as: ready(id, slot)
{fragment:in_turn};
-- as: moved
{fragment:done_if_ready};
{fragment:attempt_completed};
{fragment:record_completed};
{fragment:store_result};
-- as: woken
update task set status = 'PENDING', hold = null, version = task.version + 1, updated_at = :now,
  event_xid = {fragment:event_xid}
where task.id in (select ready.id from {ready})
returning {fragment:unblocked_columns};
{fragment:record_unblocked};
update task_body set follows = :id
where task_body.workspace = :workspace and task_body.task in (select ready.id from {ready});
update task_group set open = task_group.open - 1, succeeded = task_group.succeeded + 1,
  follows = :id, turn = ready.slot, updated_at = :now
from {ready} where task_group.id = :parent and task_group.workspace = :workspace;
-- answer: woken(id, status, lane)

-- fragment: before_next only postgres
select :born as id
from (
  select task.workspace from task where {fragment:can_complete} and task.awaited = 0 for update
) mine
cross join lateral (
  select flow.id from flow
  where flow.id = :flow and flow.workspace = mine.workspace and flow.status = 'RUNNING'
  offset 0 for update
) held
where not exists (select 1 from task_body body where body.flow = :flow and body.key = :key)

-- fragment: before_next only sqlite
select :born as id
where exists (select 1 from task where {fragment:can_complete} and task.awaited = 0)
  and exists (select 1 from flow where flow.id = :flow and flow.workspace = :workspace and flow.status = 'RUNNING')
  and not exists (select 1 from task_body body where body.flow = :flow and body.key = :key {own:body})

-- name: complete_and_activate
-- Completes an attempt on which no task depends, and inserts the task that takes its position in
-- the flow, if its key was not activated before. Raises `Conflict` when another one is inserted at
-- the same moment.
-- params: id uuid, attempt bigint, token text, workspace uuid, flow uuid, key text, born uuid, now timestamptz
-- rows: result(task uuid, workspace uuid, output json, summary text)
-- rows: body(task uuid, workspace uuid, created_by text, {typed:body})
-- rows: hot(id uuid, workspace uuid, actor text, {typed:hot})
-- rows: label(task uuid, workspace uuid, label text)
-- rows: tag(task uuid, workspace uuid, tag text)
-- rows: capability(task uuid, workspace uuid, capability text)
-- as: ready(id)
{fragment:before_next};
-- as: moved
{fragment:done_if_ready};
{fragment:attempt_completed};
{fragment:record_completed};
{fragment:store_result};
{fragment:new_body}
from {rows:body of ready};
{fragment:new_task}
from {rows:hot of ready};
{fragment:record_submitted}
from {rows:hot of ready};
{fragment:new_label}
from {rows:label of ready};
{fragment:new_tag}
from {rows:tag of ready};
{fragment:new_capability}
from {rows:capability of ready};
-- answer: ready(id)
