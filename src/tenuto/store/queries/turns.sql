-- Concurrency keys: who has a place, and who stands in line for one.

-- name: turn_wishes
-- What tasks said about their concurrency, where they did.
-- rows: wanted(task uuid, workspace uuid)
select body.task as id, body.workspace, body.concurrency from {rows:wanted}
join task_body body on body.workspace = wanted.workspace and body.task = wanted.task
where body.concurrency is not null;

-- name: turn_keys_locked
-- Hold keys, in order, each with so many more numbers; answers the last number of each.
-- rows: wanted(workspace uuid, key text, n bigint)
insert into turn_key (workspace, key, last)
select wanted.workspace, wanted.key, wanted.n from {rows:wanted}
where true
on conflict (workspace, key) do update set last = turn_key.last + excluded.last
returning workspace, key, last;

-- name: turn_leave
-- Take tasks out of their lines and places. The caller holds their keys.
-- params: ids uuid[]
delete from task_turn where task_turn.task in (select value from {each:ids}) {own:task_turn};

-- name: turn_enter
-- Put tasks that ask for a place into their lines; who stands there already keeps the number. The
-- caller holds the keys.
-- rows: asked(task uuid, workspace uuid, key text, number bigint, most bigint)
insert into task_turn (task, workspace, key, number, most, held)
select asked.task, asked.workspace, asked.key, asked.number, asked.most, false
from {rows:asked} join task on task.id = asked.task and task.workspace = asked.workspace
where task.status = 'WAITING' and task.hold = 'concurrency' and task.unmet = 0
on conflict (task) do update set held = false,
  number = case when task_turn.held then excluded.number else task_turn.number end
  where task_turn.workspace = excluded.workspace
returning task_turn.task as id, task_turn.number;

-- name: turn_line
-- The first in a key's line that could run, and how many have a place. The caller holds the key.
-- params: workspace uuid, key text, most bigint
select turn.task as id, turn.most,
  (select count(*) from task_turn place where place.workspace = :workspace and place.key = :key
    and place.held = true) as places
from task_turn turn join task on task.id = turn.task
where turn.workspace = :workspace and turn.key = :key and turn.held = false
  and task.status = 'WAITING' and task.hold = 'concurrency' and task.unmet = 0
order by turn.number, turn.task limit :most;

-- name: turn_candidates
-- Tasks that are to get a place, locked, without those that somebody else holds.
-- params: ids uuid[]
select {columns:task} from task
where task.id in (select value from {each:ids}) {own:task} order by task.id {skip_locked};

-- name: turn_take
-- Note that tasks have a place. The caller holds their keys.
-- params: ids uuid[]
update task_turn set held = true where task_turn.task in (select value from {each:ids}) {own:task_turn};

-- name: turn_key_drop
-- Forget a key that nobody uses. The caller holds it.
-- params: workspace uuid, key text
delete from turn_key where turn_key.workspace = :workspace and turn_key.key = :key
  and not exists (select 1 from task_turn turn
    where turn.workspace = :workspace and turn.key = :key);

-- name: turn_before
-- The tasks of a key, oldest first, that came before a number and that nobody has cancelled yet.
-- params: workspace uuid, key text, number bigint, most bigint
select turn.task as id from task_turn turn join task on task.id = turn.task
where turn.workspace = :workspace and turn.key = :key
  and turn.number < :number and task.cancel_requested_at is null
  and task.status not in ('COMPLETED', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED')
order by turn.number, turn.task limit :most;

-- name: turns_held
-- Those of the tasks that have a place.
-- params: ids uuid[]
select task_turn.task as id from task_turn
where task_turn.task in (select value from {each:ids}) and task_turn.held = true {own:task_turn};

-- name: turns_above
-- What a task and those above it said about their concurrency, where they did.
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

-- name: turn_show
-- Where a task stands in its key's line.
-- params: task uuid, workspace uuid, most bigint
select turn.key, turn.number, turn.most, turn.held,
  (select count(*) from (select 1 from task_turn other where other.workspace = turn.workspace
    and other.key = turn.key and other.held = true limit :most) holders) as places,
  (select count(*) from (select 1 from task_turn other where other.workspace = turn.workspace
    and other.key = turn.key and other.held = false and other.number < turn.number
    limit :most) ahead) as ahead
from task_turn turn where turn.task = :task and turn.workspace = :workspace;

-- name: turns_adrift
-- Keys with a place that nobody has and somebody waits for, or that one has who has ended.
-- params: before timestamptz, most bigint
select turn.task as id, turn.workspace, turn.key, task.status
from task_turn turn join task on task.id = turn.task
where task.updated_at < :before and (
  task.status in ('COMPLETED', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED')
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
