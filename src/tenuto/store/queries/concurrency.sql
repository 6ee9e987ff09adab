-- Concurrency keys: which tasks hold a permit, and the queue of tasks that wait for one.

-- name: permit_requests
-- Returns the concurrency settings of those tasks that have any.
-- rows: wanted(task uuid, workspace uuid)
select body.task as id, body.workspace, body.concurrency from {rows:wanted}
join task_body body on body.workspace = wanted.workspace and body.task = wanted.task
where body.concurrency is not null;

-- name: permit_keys_locked
-- Locks keys, in order, and reserves `n` queue numbers for each; returns the last number of each
-- key.
-- rows: wanted(workspace uuid, key text, n bigint)
insert into turn_key (workspace, key, last)
select wanted.workspace, wanted.key, wanted.n from {rows:wanted}
where true
on conflict (workspace, key) do update set last = turn_key.last + excluded.last
returning workspace, key, last;

-- name: permit_release
-- Removes tasks from their queues and releases their permits. The caller has locked their keys.
-- params: ids uuid[]
delete from task_turn where task_turn.task in (select value from {each:ids}) {own:task_turn};

-- name: permit_enqueue
-- Adds tasks that need a permit to their queues; a queued task keeps its number. The caller has
-- locked the keys.
-- rows: asked(task uuid, workspace uuid, key text, number bigint, most bigint)
insert into task_turn (task, workspace, key, number, most, held)
select asked.task, asked.workspace, asked.key, asked.number, asked.most, false
from {rows:asked} join task on task.id = asked.task and task.workspace = asked.workspace
where task.status = 'WAITING' and task.hold = 'concurrency' and task.unmet = 0
on conflict (task) do update set held = false,
  number = case when task_turn.held then excluded.number else task_turn.number end
  where task_turn.workspace = excluded.workspace
returning task_turn.task as id, task_turn.number;

-- name: permit_queue
-- Returns the first tasks in the queue of a key that could run, and how many tasks hold a permit.
-- The caller has locked the key.
-- params: workspace uuid, key text, most bigint
select turn.task as id, turn.most,
  (select count(*) from task_turn place where place.workspace = :workspace and place.key = :key
    and place.held = true) as places
from task_turn turn join task on task.id = turn.task
where turn.workspace = :workspace and turn.key = :key and turn.held = false
  and task.status = 'WAITING' and task.hold = 'concurrency' and task.unmet = 0
order by turn.number, turn.task limit :most;

-- name: permit_candidates
-- Returns tasks that will get a permit, locked, without those that another process has locked.
-- params: ids uuid[]
select {columns:task} from task
where task.id in (select value from {each:ids}) {own:task} order by task.id {skip_locked};

-- name: permit_grant
-- Records that tasks hold a permit. The caller has locked their keys.
-- params: ids uuid[]
update task_turn set held = true where task_turn.task in (select value from {each:ids}) {own:task_turn};

-- name: permit_key_delete
-- Deletes a key that no task uses. The caller has locked it.
-- params: workspace uuid, key text
delete from turn_key where turn_key.workspace = :workspace and turn_key.key = :key
  and not exists (select 1 from task_turn turn
    where turn.workspace = :workspace and turn.key = :key);

-- name: permit_older_tasks
-- Returns the tasks of a key with a smaller number, oldest first, that are unfinished and not being
-- cancelled.
-- params: workspace uuid, key text, number bigint, most bigint
select turn.task as id from task_turn turn join task on task.id = turn.task
where turn.workspace = :workspace and turn.key = :key
  and turn.number < :number and task.cancel_requested_at is null
  and task.status not in {terminal}
order by turn.number, turn.task limit :most;

-- name: permit_holders
-- Returns those of the given tasks that hold a permit.
-- params: ids uuid[]
select task_turn.task as id from task_turn
where task_turn.task in (select value from {each:ids}) and task_turn.held = true {own:task_turn};

-- name: permit_requests_above
-- Returns the concurrency settings of a task and of the tasks above it, of those that have any.
-- params: task uuid, workspace uuid, most bigint
with recursive above(task, parent, concurrency, depth) as (
  select body.task, body.parent, body.concurrency, 0 from task_body body
  where body.workspace = :workspace and body.task = :task
  union all
  select body.task, body.parent, body.concurrency, above.depth + 1
  from above join task_body body on body.workspace = :workspace and body.task = above.parent
  where above.depth < :most
)
select above.task as id, above.concurrency from above where above.concurrency is not null;

-- name: permit_queue_position
-- Returns the position of a task in the queue of its key.
-- params: task uuid, workspace uuid, most bigint
select turn.key, turn.number, turn.most, turn.held,
  (select count(*) from (select 1 from task_turn other where other.workspace = turn.workspace
    and other.key = turn.key and other.held = true limit :most) holders) as places,
  (select count(*) from (select 1 from task_turn other where other.workspace = turn.workspace
    and other.key = turn.key and other.held = false and other.number < turn.number
    limit :most) ahead) as ahead
from task_turn turn where turn.task = :task and turn.workspace = :workspace;

-- name: permits_miscounted
-- Returns keys with a free permit for which a task waits, or with a permit that a finished task
-- still holds.
-- params: before timestamptz, most bigint
select turn.task as id, turn.workspace, turn.key, task.status
from task_turn turn join task on task.id = turn.task
where task.updated_at < :before and (
  task.status in {terminal}
  or (turn.held = false and task.status = 'WAITING' and task.hold = 'concurrency'
    and task.unmet = 0
    and (select count(*) from task_turn place where place.workspace = turn.workspace
      and place.key = turn.key and place.held = true) < turn.most
    and not exists (select 1 from task_turn earlier join task other on other.id = earlier.task
      where earlier.workspace = turn.workspace and earlier.key = turn.key
        and earlier.held = false and earlier.number < turn.number
        and other.status = 'WAITING' and other.hold = 'concurrency' and other.unmet = 0)))
union all
select task.id, task.workspace, null, task.status from task
where task.status = 'WAITING' and task.hold = 'concurrency' and task.unmet = 0
  and task.updated_at < :before
  and not exists (select 1 from task_turn turn where turn.task = task.id)
limit :most;
