-- Subtasks: tasks that attempts create and wait for, and questions that handlers ask people.

-- name: child_limits
-- Returns the depth of a task below the root of its tree, the number of its children, and the quota
-- of its workspace.
-- params: id uuid, workspace uuid
select coalesce(body.depth, 0) as depth,
  (select workspace.quota from workspace where workspace.id = body.workspace) as quota,
  (select count(*) from task_body child
    where child.parent = body.task and child.workspace = body.workspace) as children
from task_body body where body.workspace = :workspace and body.task = :id;

-- name: child_depth_set
-- Stores the depth of a new child.
-- params: id uuid, workspace uuid, depth bigint
update task_body set depth = :depth where workspace = :workspace and task = :id;

-- name: child_keys
-- Returns the children that the attempts of a task created, by key, in the order of their creation.
-- params: id uuid, workspace uuid
select task_step.key, task_step.child from task_step
where task_step.task = :id and task_step.workspace = :workspace and task_step.child is not null
order by task_step.at, task_step.key;

-- name: children_locked
-- Returns the given children of a task, locked in id order.
-- params: parent uuid, workspace uuid, ids uuid[]
select task.id, task.status from task
join task_body body on body.workspace = task.workspace and body.task = task.id
where task.id in (select value from {each:ids}) and task.workspace = :workspace
  and body.parent = :parent
order by task.id {fragment:lock_tasks};

-- name: child_results
-- Returns the status, error and output of tasks.
-- params: ids uuid[]
select task.id, task.status, task.last_error, task_output.output from task
left join task_output on task_output.task = task.id
where task.id in (select value from {each:ids}) {own:task};

-- name: child_wait_set
-- Makes a task wait for exactly these children, whose completions are then followed up. The caller
-- has locked all of them.
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
-- Returns the tasks that wait for any of these children, locked in id order.
-- params: ids uuid[]
select task.id from task
where task.id in (select w.task from child_wait w where w.child in (select value from {each:ids}) {own:w})
  and task.hold = 'children'
order by task.id {lock};

-- name: child_wait_resolve
-- Records that these children have finished. The caller has locked the tasks that wait for them.
-- params: ids uuid[]
delete from child_wait where child in (select value from {each:ids}) {own:child_wait};

-- name: parents_still_waiting
-- Returns those of the given tasks that still wait for an unfinished child.
-- params: ids uuid[]
select distinct w.task as id from child_wait w where w.task in (select value from {each:ids}) {own:w};

-- name: children_live
-- Returns unfinished children of these tasks that are not being cancelled, oldest ids first.
-- params: most bigint
-- rows: parent(task uuid, workspace uuid)
select body.task as id
from {rows:parent}
join task_body body on body.parent = parent.task and body.workspace = parent.workspace
join task on task.id = body.task
where task.status not in {terminal}
  and task.cancel_requested_at is null
order by body.task limit :most;

-- name: inbox_open_question
-- Returns the open question that a task asked under a key.
-- params: task uuid, key text
select inbox_item.id, inbox_item.expires_at from inbox_item
where inbox_item.task = :task and inbox_item.key = :key and inbox_item.status = 'OPEN' {own:inbox_item};

-- name: inbox_ask
-- Inserts a question of a handler into the inbox.
-- params: id uuid, workspace uuid, task uuid, kind text, title text, body json, key text, fallback json, expires_at timestamptz, now timestamptz
insert into inbox_item (id, workspace, task, kind, title, body, key, fallback, status, expires_at,
  created_at)
select :id, :workspace, :task, :kind, :title, :body, :key, :fallback, 'OPEN', :expires_at, :now;

-- name: inbox_expired
-- Returns questions of these tasks that were not answered in time.
-- params: ids uuid[], now timestamptz
select inbox_item.id, inbox_item.task, inbox_item.workspace, inbox_item.key, inbox_item.fallback
from inbox_item
where inbox_item.task in (select value from {each:ids}) and inbox_item.key is not null
  and inbox_item.status = 'OPEN' and inbox_item.expires_at <= :now {own:inbox_item}
order by inbox_item.id;
