-- Coordinators: leadership, standbys, their events, and a fair share of due work for each
-- workspace.

-- name: leader_acquire
-- Acquires or renews the leadership and stores the report of the last cycle. A new holder
-- increments the epoch and adds an event to the leader's own audit trail. Returns no row when
-- another coordinator leads.
-- params: name text, holder text, now timestamptz, until timestamptz, data json, trail uuid, apart uuid
-- as: taken
insert into leader (name, holder, epoch, until, cycles, seen_at, led_at, data)
select :name, :holder, 1, :until, 1, :now, :now, :data
where true
on conflict (name) do update
  set holder = excluded.holder, until = excluded.until, cycles = leader.cycles + 1,
  seen_at = excluded.seen_at, data = excluded.data,
  led_at = case when leader.holder = excluded.holder then coalesce(leader.led_at, excluded.led_at)
    else excluded.led_at end,
  epoch = leader.epoch + case when leader.holder = excluded.holder then 0 else 1 end
  where leader.holder = excluded.holder or leader.until < :now
returning name, epoch, until, led_at;
{event: task = :trail, seq = taken.epoch, workspace = :apart, kind = taken.name || '.led',
  message = 'became leader, epoch ' || taken.epoch, actor = :holder}
from {taken} where taken.led_at = :now
on conflict (task, seq) do nothing;
-- answer: taken(epoch, until, led_at)

-- name: leader_resign
-- Gives up the leadership at once and removes the standby entry.
-- params: name text, holder text, standby text, now timestamptz
update leader set until = :now where name = :name and holder = :holder;
delete from leader where name = :standby;

-- name: leader
-- Returns the leader, since when it leads, and the report of its last cycle.
-- params: name text
select leader.holder, leader.epoch, leader.until, leader.cycles, leader.seen_at, leader.led_at,
  leader.data
from leader
where leader.name = :name;

-- name: standby_record
-- Records that a coordinator is on standby until a given time; entries that are not renewed in time
-- are deleted.
-- params: name text, holder text, now timestamptz, until timestamptz
insert into leader (name, holder, epoch, until, cycles, seen_at)
select :name, :holder, 0, :until, 1, :now
where true
on conflict (name) do update set until = excluded.until, seen_at = excluded.seen_at;
delete from leader where name like 'standby:%' and name <> :name and until < :now;

-- name: standbys
-- Returns the coordinators on standby that do not lead.
-- params: leader text, now timestamptz
select s.holder from leader s
where s.name like 'standby:%' and s.until > :now
  and not exists (select 1 from leader l where l.name = :leader and l.holder = s.holder)
order by s.holder limit 100;

-- name: coordinator_event_add
-- Inserts an event of a coordinator itself, without task and workspace.
-- params: id uuid, apart uuid, kind text, level text, message text, actor text, data json, now timestamptz
{event: seq = 1, workspace = :apart, kind = :kind, level = :level, message = :message,
  data = :data};

-- name: coordinator_events
-- Returns the newest events of coordinators themselves with one of the given levels, newest first.
-- params: apart uuid, most bigint
select {fragment:event_columns}
from event where event.new is null and event.workspace = :apart
  and event.level in ({literal:levels})
order by event.at desc limit :most;

-- fragment: one_each
-- Only tasks that an attempt owns have a lease, so the locked rows are checked by `lease_until`
-- alone. The rows are then found by key, however many tasks are leased.
select r.id from (
  select t.id, row_number() over (partition by t.workspace order by t.id) as turn from task t
  where t.status in {leased} and t.lease_until < :now) r
order by r.turn, r.id limit :most

-- fragment: among_first_each only postgres
= any (array({fragment:one_each}))

-- fragment: among_first_each only sqlite
in ({fragment:one_each})

-- name: leases_expired_by_workspace
-- Returns leased tasks whose lease has expired: the first of each workspace, then the second of
-- each, and so on; tasks that another process handles are skipped.
-- params: now timestamptz, most bigint
select {columns:task} from task
where task.lease_until < :now and task.id {fragment:among_first_each}
order by task.id {skip_locked};

-- fragment: not_exempt
-- Only tasks that an attempt owns have a lease.
and (lease_until is null or lease_until < :spared_from or lease_until >= :spared_to)

-- name: workspaces_due
-- Returns workspaces after a given id that have a task with a due timer, except tasks with exempt
-- leases.
-- params: now timestamptz, after uuid, most bigint, spared_from timestamptz, spared_to timestamptz
select workspace.id from workspace
where exists (select 1 from task
  where task.workspace = workspace.id and task.due_at is not null and task.due_at <= :now
  [spared_from: {fragment:not_exempt}])
  [after: and workspace.id > :after]
order by workspace.id limit :most;

-- fragment: due_of_each only postgres
cross join lateral (select t.* from task t
  where t.workspace = share.workspace and t.due_at is not null and t.due_at <= :now
  [spared_from: {fragment:not_exempt}]
  order by t.due_at limit :each for update skip locked) task

-- fragment: due_of_each only sqlite
join task on task.workspace = share.workspace and task.id in (select t.id from task t
  where t.workspace = share.workspace and t.due_at is not null and t.due_at <= :now
  [spared_from: {fragment:not_exempt}]
  order by t.due_at limit :each)

-- name: tasks_due_by_workspace
-- Returns the first tasks with a due timer of each given workspace, except tasks with exempt
-- leases; tasks that another process handles are skipped.
-- params: now timestamptz, each bigint, spared_from timestamptz, spared_to timestamptz
-- rows: share(workspace uuid)
select {columns:task} from {rows:share} {fragment:due_of_each};
