-- Schedules and triggers: what is started by time and after events; events that people publish.

-- fragment: schedule_columns
s.id, s.workspace, s.name, s.target, s.spec, s.input, s.status, s.last_at, s.next_at, s.fired,
  s.missed, s.queued, s.fired_at, s.last_flow, s.last_error, s.version, s.created_by, s.created_at,
  s.updated_at

-- name: schedule_add
-- A new schedule with its first events; nothing when the name is taken or there are too many.
-- params: id uuid, workspace uuid, name text, target text, spec json, input json, status text, last_at timestamptz, next_at timestamptz, fired bigint, missed bigint, queued json, fired_at timestamptz, last_flow uuid, last_error text, version bigint, actor text, now timestamptz, most bigint
-- rows: noted(id uuid, seq bigint, kind text, level text, message text, data json)
-- as: made
insert into schedule (id, workspace, name, target, spec, input, status, last_at, next_at, fired,
  missed, queued, fired_at, last_flow, last_error, version, created_by, created_at, updated_at)
select :id, :workspace, :name, :target, :spec, :input, :status, :last_at, :next_at, :fired, :missed,
  :queued, :fired_at, :last_flow, :last_error, :version, :actor, :now, :now
where (select count(*) from schedule s where s.workspace = :workspace) < :most
on conflict do nothing
returning id;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, data, at)
select noted.id, noted.seq, :workspace, {xid}, noted.kind, noted.level, noted.message, 0, :actor,
  noted.data, :now
from {rows:noted of made};
-- answer: made(id)

-- name: schedules
-- The schedules of a workspace, newest first, after a cursor; or the one of a name.
-- params: workspace uuid, name text, before uuid, most bigint
select {fragment:schedule_columns} from schedule s
where s.workspace = :workspace [name: and s.name = :name] [before: and s.id < :before]
order by s.id desc limit :most;

-- name: schedule
-- One schedule.
-- params: workspace uuid, id uuid
select {fragment:schedule_columns} from schedule s where s.id = :id and s.workspace = :workspace;

-- name: schedule_locked
-- One schedule, held while it changes.
-- params: workspace uuid, id uuid
select {fragment:schedule_columns} from schedule s
where s.id = :id and s.workspace = :workspace {lock};

-- name: schedules_named
-- Schedules by name, held in id order while they change.
-- params: workspace uuid, names text[]
select {fragment:schedule_columns} from schedule s
where s.workspace = :workspace and s.name in (select value from {each:names})
order by s.id {lock};

-- name: schedule_change
-- Write a changed schedule, with an event for each thing to tell. The caller holds it.
-- params: id uuid, workspace uuid, target text, spec json, input json, status text, last_at timestamptz, next_at timestamptz, fired bigint, missed bigint, queued json, fired_at timestamptz, last_flow uuid, last_error text, version bigint, actor text, now timestamptz
-- rows: noted(id uuid, seq bigint, kind text, level text, message text, data json)
-- as: moved
update schedule set target = :target, spec = :spec, input = :input, status = :status,
  last_at = :last_at, next_at = :next_at, fired = :fired, missed = :missed, queued = :queued,
  fired_at = :fired_at, last_flow = :last_flow, last_error = :last_error, version = :version,
  updated_at = :now
where id = :id and workspace = :workspace
returning id;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, data, at)
select noted.id, noted.seq, :workspace, {xid}, noted.kind, noted.level, noted.message, 0, :actor,
  noted.data, :now
from {rows:noted of moved};
-- answer: moved(id)

-- name: schedule_remove
-- Remove a schedule; its trail stays.
-- params: workspace uuid, id uuid, actor text, now timestamptz
-- as: gone
delete from schedule where id = :id and workspace = :workspace returning id, name, version;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, at)
select gone.id, gone.version + 1, :workspace, {xid}, 'schedule_deleted', 'INFO', gone.name, 0,
  :actor, :now
from {gone};
-- answer: gone(id)

-- name: schedules_due
-- Schedules of all workspaces with a time that has come, earliest first.
-- params: now timestamptz, most bigint
select s.id, s.workspace, s.name, s.target, s.input from schedule s
where s.status = 'ACTIVE' and s.next_at is not null and s.next_at <= :now
order by s.next_at limit :most;

-- name: schedules_free
-- Schedules of all workspaces with a time that waits for a start before, which has ended.
-- params: most bigint
select s.id, s.workspace, s.name, s.target, s.input from schedule s
where s.status = 'ACTIVE' and s.queued is not null
  and not exists (select 1 from flow where flow.workspace = s.workspace
    and flow.source = 'schedule:' || cast(s.id as text) and flow.status in ('RUNNING', 'PAUSED'))
order by s.updated_at limit :most;

-- name: schedule_take
-- A schedule that is still ACTIVE, held; nothing when somebody else is at it.
-- params: id uuid
select {fragment:schedule_columns} from schedule s
where s.id = :id and s.status = 'ACTIVE' {skip_locked};

-- name: schedule_flows
-- What a schedule started and has not ended, oldest first.
-- params: workspace uuid, source text, most bigint
select flow.id from flow
where flow.workspace = :workspace and flow.source = :source
  and flow.status in ('RUNNING', 'PAUSED')
order by flow.id limit :most;

-- fragment: trigger_columns
t.id, t.workspace, t.name, t.event, t.filter, t.target, t.status, t.active_at, t.fired, t.fired_at,
  t.last_flow, t.last_error, t.version, t.created_by, t.created_at, t.updated_at

-- name: trigger_add
-- A new trigger with its first event; nothing when the name is taken or there are too many.
-- params: id uuid, workspace uuid, name text, event text, filter text, target text, actor text, now timestamptz, most bigint
-- as: made
insert into trigger_rule (id, workspace, name, event, filter, target, status, active_at, created_by,
  created_at, updated_at)
select :id, :workspace, :name, :event, :filter, :target, 'ACTIVE', :now, :actor, :now, :now
where (select count(*) from trigger_rule t where t.workspace = :workspace) < :most
on conflict do nothing
returning id;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, at)
select made.id, 1, :workspace, {xid}, 'trigger_created', 'INFO', :name, 0, :actor, :now
from {made};
-- answer: made(id)

-- name: triggers
-- The triggers of a workspace, newest first, after a cursor; or the one of a name.
-- params: workspace uuid, name text, before uuid, most bigint
select {fragment:trigger_columns} from trigger_rule t
where t.workspace = :workspace [name: and t.name = :name] [before: and t.id < :before]
order by t.id desc limit :most;

-- name: trigger
-- One trigger.
-- params: workspace uuid, id uuid
select {fragment:trigger_columns} from trigger_rule t
where t.id = :id and t.workspace = :workspace;

-- name: trigger_locked
-- One trigger, held while it changes or starts something.
-- params: workspace uuid, id uuid
select {fragment:trigger_columns} from trigger_rule t
where t.id = :id and t.workspace = :workspace {lock};

-- name: triggers_named
-- Triggers by name, held in id order while they change.
-- params: workspace uuid, names text[]
select {fragment:trigger_columns} from trigger_rule t
where t.workspace = :workspace and t.name in (select value from {each:names})
order by t.id {lock};

-- name: trigger_set
-- Write what a person changed of a trigger, with an event. The caller holds it.
-- params: id uuid, workspace uuid, event text, filter text, target text, status text, active_at timestamptz, last_error text, kind text, actor text, now timestamptz
-- as: moved
update trigger_rule set event = :event, filter = :filter, target = :target, status = :status,
  active_at = :active_at, last_error = :last_error, version = version + 1, updated_at = :now
where id = :id and workspace = :workspace
returning id, name, version;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, at)
select moved.id, moved.version, :workspace, {xid}, :kind, 'INFO', moved.name, 0, :actor, :now
from {moved};
-- answer: moved(id)

-- name: trigger_fired
-- Note that a trigger has started a flow. The caller holds it.
-- params: id uuid, workspace uuid, flow uuid, data json, actor text, now timestamptz
-- as: moved
update trigger_rule set fired = fired + 1, fired_at = :now, last_flow = :flow, last_error = null,
  version = version + 1
where id = :id and workspace = :workspace
returning id, name, version;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, data, at)
select moved.id, moved.version, :workspace, {xid}, 'trigger_fired', 'INFO', moved.name, 0, :actor,
  :data, :now
from {moved};
-- answer: moved(id)

-- name: trigger_failed
-- Note why a trigger has started nothing, once for each reason in a row.
-- params: id uuid, workspace uuid, error text, actor text, now timestamptz
-- as: moved
update trigger_rule set last_error = :error, version = version + 1
where id = :id and workspace = :workspace and (last_error is null or last_error <> :error)
returning id, version;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, at)
select moved.id, moved.version, :workspace, {xid}, 'trigger_failed', 'ERROR', :error, 0, :actor,
  :now
from {moved};
-- answer: moved(id)

-- name: trigger_remove
-- Remove a trigger; its trail stays.
-- params: workspace uuid, id uuid, actor text, now timestamptz
-- as: gone
delete from trigger_rule where id = :id and workspace = :workspace returning id, name, version;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, at)
select gone.id, gone.version + 1, :workspace, {xid}, 'trigger_deleted', 'INFO', gone.name, 0,
  :actor, :now
from {gone};
-- answer: gone(id)

-- name: triggers_of
-- The active triggers of workspaces.
-- params: workspaces uuid[]
select {fragment:trigger_columns} from trigger_rule t
where t.status = 'ACTIVE' and t.workspace in (select value from {each:workspaces})
order by t.id;

-- name: triggers_ahead
-- Whether events wait for triggers: a row if there are any, with whether anybody wants them.
-- params: name text
select case when exists (select 1 from trigger_rule t where t.status = 'ACTIVE') then 1 else 0 end
  as wanted
from {fragment:last_event} where {fragment:is_ahead};

-- name: triggers_skip
-- Move past all events if there is no active trigger. One snapshot sees both, so none that is made
-- meanwhile misses an event that came after it.
-- params: name text, now timestamptz
insert into cursor (name, xid, position, updated_at)
select :name, last.xid, last.position, :now from {fragment:last_event}
where not exists (select 1 from trigger_rule t where t.status = 'ACTIVE') and {fragment:is_ahead}
on conflict (name) do update
  set xid = excluded.xid, position = excluded.position, updated_at = excluded.updated_at
  where (cursor.xid, cursor.position) < (excluded.xid, excluded.position);

-- name: told_tasks
-- What events say of tasks beyond their rows of the trail.
-- rows: wanted(task uuid, workspace uuid)
select body.task as id, body.workspace, body.key, body.title, body.task_type, body.flow,
  body.group_id, body.parent
from {rows:wanted}
join task_body body on body.workspace = wanted.workspace and body.task = wanted.task;

-- name: told_groups
-- The same of groups.
-- rows: wanted(id uuid, workspace uuid)
select task_group.id, task_group.key, task_group.title, task_group.flow from {rows:wanted}
join task_group on task_group.id = wanted.id and task_group.workspace = wanted.workspace;

-- name: told_flows
-- The same of flows, with what started them.
-- rows: wanted(id uuid, workspace uuid)
select flow.id, flow.key, flow.title, flow.source, flow.cause from {rows:wanted}
join flow on flow.id = wanted.id and flow.workspace = wanted.workspace;

-- name: caused
-- How many flows followed from one, up to a limit.
-- params: cause uuid, most bigint
select count(*) as n from (select 1 from flow where flow.cause = :cause {own:flow} limit :most) found;

-- name: flow_caused
-- Note of a new flow which one it followed from.
-- params: id uuid, cause uuid
update flow set cause = :cause where flow.id = :id {own:flow};

-- name: event_publish
-- An event that somebody publishes.
-- params: id uuid, workspace uuid, name text, data json, cause text, actor text, now timestamptz
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, data,
  causation_id, at)
select :id, 1, :workspace, {xid}, 'event', 'INFO', :name, 0, :actor, :data, :cause, :now
returning task as id;

-- name: causes
-- The tasks on whose behalf events were published.
-- params: ids uuid[]
select event.task as id, event.causation_id from event
where event.task in (select value from {each:ids}) and event.seq = 1
  and event.causation_id is not null;

-- name: prune_other
-- Remove events of no task past their age, a bounded number.
-- params: before timestamptz, most bigint
delete from event where (task, seq) in (
  select event.task, event.seq from event
  where event.new is null and event.at < :before limit :most)
returning task as id;
