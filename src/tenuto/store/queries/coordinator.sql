-- Who coordinates, what it tells of itself, and fair shares of what it has to do.

-- name: leader_take
-- Become or stay the leader and tell how the last cycle went; a new holder raises the epoch, with an event of the leader's own trail. Answers nothing when another leads.
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
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, at)
select :trail, taken.epoch, :apart, {xid}, taken.name || '.led', 'INFO',
  'leads from now on, epoch ' || taken.epoch, 0, :holder, :now
from {taken} where taken.led_at = :now
on conflict (task, seq) do nothing;
-- answer: taken(epoch, until, led_at)

-- name: leader_resign
-- Let somebody else lead at once, and stand by no more.
-- params: name text, holder text, standby text, now timestamptz
update leader set until = :now where name = :name and holder = :holder;
delete from leader where name = :standby;

-- name: leader
-- Who leads, since when, and how its last cycle went.
-- params: name text
select leader.holder, leader.epoch, leader.until, leader.cycles, leader.seen_at, leader.led_at,
  leader.data
from leader
where leader.name = :name;

-- name: standby_note
-- Say that somebody stands by until an instant; whoever has not said so in time is forgotten.
-- params: name text, holder text, now timestamptz, until timestamptz
insert into leader (name, holder, epoch, until, cycles, seen_at)
select :name, :holder, 0, :until, 1, :now
where true
on conflict (name) do update set until = excluded.until, seen_at = excluded.seen_at;
delete from leader where name like 'standby:%' and name <> :name and until < :now;

-- name: standbys
-- Who stands by and does not lead.
-- params: leader text, now timestamptz
select s.holder from leader s
where s.name like 'standby:%' and s.until > :now
  and not exists (select 1 from leader l where l.name = :leader and l.holder = s.holder)
order by s.holder limit 100;

-- name: coordinator_note
-- An event of a coordinator itself, of no task and no tenant.
-- params: id uuid, apart uuid, kind text, level text, message text, actor text, data json, now timestamptz
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, data, at)
select :id, 1, :apart, {xid}, :kind, :level, :message, 0, :actor, :data, :now;

-- name: coordinator_events
-- The newest events of given levels of coordinators themselves, newest first.
-- params: apart uuid, most bigint
select event.seq, event.kind, event.level, event.message, event.previous, event.new,
  event.attempt, event.agent, event.actor, event.session_key, event.stack_trace, event.data,
  event.at
from event where event.new is null and event.workspace = :apart
  and event.level in ({literal:levels})
order by event.at desc limit :most;

-- fragment: one_each
-- Only what is held has a lease, so its end alone is asked of the rows that are locked: they are
-- found by their key then, however many are held.
select r.id from (
  select t.id, row_number() over (partition by t.workspace order by t.id) as turn from task t
  where t.status in ('ASSIGNED', 'RUNNING') and t.lease_until < :now) r
order by r.turn, r.id limit :most

-- fragment: among_first only postgres
= any (array({fragment:one_each}))

-- fragment: among_first only sqlite
in ({fragment:one_each})

-- name: leases_expired_in_turns
-- Leased tasks whose lease has run out, the first of each workspace, then the second of each, unless somebody else handles them.
-- params: now timestamptz, most bigint
select {columns:task} from task
where task.lease_until < :now and task.id {fragment:among_first}
order by task.id {skip_locked};

-- fragment: not_spared
-- Only what is held has a lease.
and (lease_until is null or lease_until < :spared_from or lease_until >= :spared_to)

-- name: workspaces_due
-- Workspaces with a task whose timer has come, but for spared leases, from one on.
-- params: now timestamptz, after uuid, most bigint, spared_from timestamptz, spared_to timestamptz
select workspace.id from workspace
where exists (select 1 from task
  where task.workspace = workspace.id and task.due_at is not null and task.due_at <= :now
  [spared_from: {fragment:not_spared}])
  [after: and workspace.id > :after]
order by workspace.id limit :most;

-- fragment: due_of_each only postgres
cross join lateral (select t.* from task t
  where t.workspace = share.workspace and t.due_at is not null and t.due_at <= :now
  [spared_from: {fragment:not_spared}]
  order by t.due_at limit :each for update skip locked) task

-- fragment: due_of_each only sqlite
join task on task.workspace = share.workspace and task.id in (select t.id from task t
  where t.workspace = share.workspace and t.due_at is not null and t.due_at <= :now
  [spared_from: {fragment:not_spared}]
  order by t.due_at limit :each)

-- name: tasks_due_shared
-- The first tasks whose timer has come of each of some workspaces, but for spared leases, unless somebody else handles them.
-- params: now timestamptz, each bigint, spared_from timestamptz, spared_to timestamptz
-- rows: share(workspace uuid)
select {columns:task} from {rows:share} {fragment:due_of_each};
