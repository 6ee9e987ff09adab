-- Tasks that attempts make and wait for, and what they ask people.

-- name: child_room
-- How deep a task stands below the first of its tree, how many children it has, and its workspace's
-- quota.
-- params: id uuid, workspace uuid
select coalesce(body.depth, 0) as depth,
  (select workspace.quota from workspace where workspace.id = body.workspace) as quota,
  (select count(*) from task_body child
    where child.parent = body.task and child.workspace = body.workspace) as children
from task_body body where body.workspace = :workspace and body.task = :id;

-- name: child_place
-- Note how deep a new child stands.
-- params: id uuid, workspace uuid, depth bigint
update task_body set depth = :depth where workspace = :workspace and task = :id;

-- name: child_keys
-- The children that a task's attempts made, by key, in the order in which they were made.
-- params: id uuid, workspace uuid
select task_step.key, task_step.child from task_step
where task_step.task = :id and task_step.workspace = :workspace and task_step.child is not null
order by task_step.at, task_step.key;

-- name: children_locked
-- These of a task's children, locked in id order.
-- params: parent uuid, workspace uuid, ids uuid[]
select task.id, task.status from task
join task_body body on body.workspace = task.workspace and body.task = task.id
where task.id in (select value from {each:ids}) and task.workspace = :workspace
  and body.parent = :parent
order by task.id {fragment:lock_tasks};

-- name: child_results
-- How tasks ended, or how they are.
-- params: ids uuid[]
select task.id, task.status, task.last_error, task_output.output from task
left join task_output on task_output.task = task.id
where task.id in (select value from {each:ids}) {own:task};

-- name: child_await
-- Let a task wait for these children and no others, whose ends are told. The caller holds all.
-- params: task uuid, workspace uuid, ids uuid[]
delete from child_wait where task = :task and workspace = :workspace
  and child not in (select value from {each:ids});
insert into child_wait (task, child, workspace)
select :task, value, :workspace from {each:ids} where true
on conflict do nothing;
update task set watched = true
where task.id in (select value from {each:ids}) and task.workspace = :workspace
  and not task.watched;

-- name: parents_waiting
-- The tasks that wait for any of these children, locked in id order.
-- params: ids uuid[]
select task.id from task
where task.id in (select w.task from child_wait w where w.child in (select value from {each:ids}) {own:w})
  and task.hold = 'children'
order by task.id {lock};

-- name: child_settle
-- Note that these children have ended. The caller holds those who wait for them.
-- params: ids uuid[]
delete from child_wait where child in (select value from {each:ids}) {own:child_wait};

-- name: parents_still
-- Those of the tasks that wait for some child that has not ended.
-- params: ids uuid[]
select distinct w.task as id from child_wait w where w.task in (select value from {each:ids}) {own:w};

-- name: children_live
-- Children of these tasks that have not ended and are not about to, oldest ids first.
-- params: most bigint
-- rows: parent(task uuid, workspace uuid)
select body.task as id
from {rows:parent}
join task_body body on body.parent = parent.task and body.workspace = parent.workspace
join task on task.id = body.task
where task.status not in ('COMPLETED', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED')
  and task.cancel_requested_at is null
order by body.task limit :most;

-- name: inbox_asked
-- What a task has asked under a key and nobody has answered.
-- params: task uuid, key text
select inbox_item.id, inbox_item.expires_at from inbox_item
where inbox_item.task = :task and inbox_item.key = :key and inbox_item.status = 'OPEN' {own:inbox_item};

-- name: inbox_ask
-- Put a handler's question to people.
-- params: id uuid, workspace uuid, task uuid, kind text, title text, body json, key text, fallback json, expires_at timestamptz, now timestamptz
insert into inbox_item (id, workspace, task, kind, title, body, key, fallback, status, expires_at,
  created_at)
select :id, :workspace, :task, :kind, :title, :body, :key, :fallback, 'OPEN', :expires_at, :now;

-- name: inbox_lapsed
-- What handlers of these tasks asked and nobody answered in time.
-- params: ids uuid[], now timestamptz
select inbox_item.id, inbox_item.task, inbox_item.workspace, inbox_item.key, inbox_item.fallback
from inbox_item
where inbox_item.task in (select value from {each:ids}) and inbox_item.key is not null
  and inbox_item.status = 'OPEN' and inbox_item.expires_at <= :now {own:inbox_item}
order by inbox_item.id;
