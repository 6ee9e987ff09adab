-- Schedules and triggers, which start flows by time and by events; events that users publish.

-- fragment: schedule_columns
s.id, s.workspace, s.name, s.target, s.spec, s.input, s.status, s.last_at, s.next_at, s.fired,
  s.missed, s.queued, s.fired_at, s.last_flow, s.last_error, s.version, s.created_by, s.created_at,
  s.updated_at

-- name: schedule_add
-- Inserts a schedule with its first events; inserts nothing when the name is taken or the workspace
-- has too many.
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
{event of noted: seq = noted.seq, workspace = :workspace, kind = noted.kind, level = noted.level,
  message = noted.message, data = noted.data}
from {rows:noted of made};
-- answer: made(id)

-- name: schedules
-- Returns the schedules of a workspace, newest first, after a cursor; or the one with a name.
-- params: workspace uuid, name text, before uuid, most bigint
select {fragment:schedule_columns} from schedule s
where s.workspace = :workspace [name: and s.name = :name] [before: and s.id < :before]
order by s.id desc limit :most;

-- name: schedule
-- Returns one schedule.
-- params: workspace uuid, id uuid
select {fragment:schedule_columns} from schedule s where s.id = :id and s.workspace = :workspace;

-- name: schedule_locked
-- Returns one schedule, locked until the end of the transaction.
-- params: workspace uuid, id uuid
select {fragment:schedule_columns} from schedule s
where s.id = :id and s.workspace = :workspace {lock};

-- name: schedules_by_name
-- Returns schedules by name, locked in id order until the end of the transaction.
-- params: workspace uuid, names text[]
select {fragment:schedule_columns} from schedule s
where s.workspace = :workspace and s.name in (select value from {each:names})
order by s.id {lock};

-- name: schedule_update
-- Writes a changed schedule, with its events. The caller has locked it.
-- params: id uuid, workspace uuid, target text, spec json, input json, status text, last_at timestamptz, next_at timestamptz, fired bigint, missed bigint, queued json, fired_at timestamptz, last_flow uuid, last_error text, version bigint, actor text, now timestamptz
-- rows: noted(id uuid, seq bigint, kind text, level text, message text, data json)
-- as: moved
update schedule set target = :target, spec = :spec, input = :input, status = :status,
  last_at = :last_at, next_at = :next_at, fired = :fired, missed = :missed, queued = :queued,
  fired_at = :fired_at, last_flow = :last_flow, last_error = :last_error, version = :version,
  updated_at = :now
where id = :id and workspace = :workspace
returning id;
{event of noted: seq = noted.seq, workspace = :workspace, kind = noted.kind, level = noted.level,
  message = noted.message, data = noted.data}
from {rows:noted of moved};
-- answer: moved(id)

-- name: schedule_delete
-- Deletes a schedule; its audit trail stays.
-- params: workspace uuid, id uuid, actor text, now timestamptz
-- as: gone
delete from schedule where id = :id and workspace = :workspace returning id, name, version;
{event of gone: seq = gone.version + 1, workspace = :workspace, kind = 'schedule_deleted',
  message = gone.name}
from {gone};
-- answer: gone(id)

-- name: schedules_due
-- Returns schedules of all workspaces with a due time, earliest first.
-- params: now timestamptz, most bigint
select s.id, s.workspace, s.name, s.target, s.input from schedule s
where s.status = 'ACTIVE' and s.next_at is not null and s.next_at <= :now
order by s.next_at limit :most;

-- name: schedules_unblocked
-- Returns schedules of all workspaces with a queued time whose previous flow has finished.
-- params: most bigint
select s.id, s.workspace, s.name, s.target, s.input from schedule s
where s.status = 'ACTIVE' and s.queued is not null
  and not exists (select 1 from flow where flow.workspace = s.workspace
    and flow.source = 'schedule:' || cast(s.id as text) and flow.status in ('RUNNING', 'PAUSED'))
order by s.updated_at limit :most;

-- name: schedule_lock_active
-- Returns a schedule that is still ACTIVE, locked; no row when another process has locked it.
-- params: id uuid
select {fragment:schedule_columns} from schedule s
where s.id = :id and s.status = 'ACTIVE' {skip_locked};

-- name: schedule_flows
-- Returns the unfinished flows that a schedule started, oldest first.
-- params: workspace uuid, source text, most bigint
select flow.id from flow
where flow.workspace = :workspace and flow.source = :source
  and flow.status in ('RUNNING', 'PAUSED')
order by flow.id limit :most;

-- fragment: trigger_columns
t.id, t.workspace, t.name, t.event, t.filter, t.target, t.status, t.active_at, t.fired, t.fired_at,
  t.last_flow, t.last_error, t.version, t.created_by, t.created_at, t.updated_at

-- name: trigger_add
-- Inserts a trigger with its first event; inserts nothing when the name is taken or the workspace
-- has too many.
-- params: id uuid, workspace uuid, name text, event text, filter text, target text, actor text, now timestamptz, most bigint
-- as: made
insert into trigger_rule (id, workspace, name, event, filter, target, status, active_at, created_by,
  created_at, updated_at)
select :id, :workspace, :name, :event, :filter, :target, 'ACTIVE', :now, :actor, :now, :now
where (select count(*) from trigger_rule t where t.workspace = :workspace) < :most
on conflict do nothing
returning id;
{event of made: seq = 1, workspace = :workspace, kind = 'trigger_created', message = :name}
from {made};
-- answer: made(id)

-- name: triggers
-- Returns the triggers of a workspace, newest first, after a cursor; or the one with a name.
-- params: workspace uuid, name text, before uuid, most bigint
select {fragment:trigger_columns} from trigger_rule t
where t.workspace = :workspace [name: and t.name = :name] [before: and t.id < :before]
order by t.id desc limit :most;

-- name: trigger
-- Returns one trigger.
-- params: workspace uuid, id uuid
select {fragment:trigger_columns} from trigger_rule t
where t.id = :id and t.workspace = :workspace;

-- name: trigger_locked
-- Returns one trigger, locked until the end of the transaction.
-- params: workspace uuid, id uuid
select {fragment:trigger_columns} from trigger_rule t
where t.id = :id and t.workspace = :workspace {lock};

-- name: triggers_by_name
-- Returns triggers by name, locked in id order until the end of the transaction.
-- params: workspace uuid, names text[]
select {fragment:trigger_columns} from trigger_rule t
where t.workspace = :workspace and t.name in (select value from {each:names})
order by t.id {lock};

-- name: trigger_update
-- Writes a user's changes of a trigger, with an event. The caller has locked it.
-- params: id uuid, workspace uuid, event text, filter text, target text, status text, active_at timestamptz, last_error text, kind text, actor text, now timestamptz
-- as: moved
update trigger_rule set event = :event, filter = :filter, target = :target, status = :status,
  active_at = :active_at, last_error = :last_error, version = version + 1, updated_at = :now
where id = :id and workspace = :workspace
returning id, name, version;
{event of moved: workspace = :workspace, kind = :kind, message = moved.name}
from {moved};
-- answer: moved(id)

-- name: trigger_fired
-- Records that a trigger started a flow. The caller has locked it.
-- params: id uuid, workspace uuid, flow uuid, data json, actor text, now timestamptz
-- as: moved
update trigger_rule set fired = fired + 1, fired_at = :now, last_flow = :flow, last_error = null,
  version = version + 1
where id = :id and workspace = :workspace
returning id, name, version;
{event of moved: workspace = :workspace, kind = 'trigger_fired', message = moved.name,
  data = :data}
from {moved};
-- answer: moved(id)

-- name: trigger_failed
-- Records why a trigger started nothing; the same reason in a row is recorded once.
-- params: id uuid, workspace uuid, error text, actor text, now timestamptz
-- as: moved
update trigger_rule set last_error = :error, version = version + 1
where id = :id and workspace = :workspace and (last_error is null or last_error <> :error)
returning id, version;
{event of moved: workspace = :workspace, kind = 'trigger_failed', level = 'ERROR',
  message = :error}
from {moved};
-- answer: moved(id)

-- name: trigger_delete
-- Deletes a trigger; its audit trail stays.
-- params: workspace uuid, id uuid, actor text, now timestamptz
-- as: gone
delete from trigger_rule where id = :id and workspace = :workspace returning id, name, version;
{event of gone: seq = gone.version + 1, workspace = :workspace, kind = 'trigger_deleted',
  message = gone.name}
from {gone};
-- answer: gone(id)

-- name: triggers_of
-- Returns the active triggers of workspaces.
-- params: workspaces uuid[]
select {fragment:trigger_columns} from trigger_rule t
where t.status = 'ACTIVE' and t.workspace in (select value from {each:workspaces})
order by t.id;

-- name: triggers_ahead
-- Returns a row if events wait for triggers, and whether any active trigger exists.
-- params: name text
select case when exists (select 1 from trigger_rule t where t.status = 'ACTIVE') then 1 else 0 end
  as wanted
from {fragment:last_event} where {fragment:is_ahead};

-- name: triggers_skip
-- Moves the cursor past all events if there is no active trigger. One snapshot sees both, so a
-- trigger that is created meanwhile misses no later event.
-- params: name text, now timestamptz
insert into cursor (name, xid, position, updated_at)
select :name, last.xid, last.position, :now from {fragment:last_event}
where not exists (select 1 from trigger_rule t where t.status = 'ACTIVE') and {fragment:is_ahead}
on conflict (name) do update
  set xid = excluded.xid, position = excluded.position, updated_at = excluded.updated_at
  where (cursor.xid, cursor.position) < (excluded.xid, excluded.position);

-- name: event_tasks
-- Returns fields of the tasks of events that their event rows do not contain.
-- rows: wanted(task uuid, workspace uuid)
select body.task as id, body.workspace, body.key, body.title, body.task_type, body.flow,
  body.group_id, body.parent
from {rows:wanted}
join task_body body on body.workspace = wanted.workspace and body.task = wanted.task;

-- name: event_groups
-- Returns fields of the groups of events that their event rows do not contain.
-- rows: wanted(id uuid, workspace uuid)
select task_group.id, task_group.key, task_group.title, task_group.flow from {rows:wanted}
join task_group on task_group.id = wanted.id and task_group.workspace = wanted.workspace;

-- name: event_flows
-- Returns fields of the flows of events that their event rows do not contain, with what started
-- each flow.
-- rows: wanted(id uuid, workspace uuid)
select flow.id, flow.key, flow.title, flow.source, flow.cause from {rows:wanted}
join flow on flow.id = wanted.id and flow.workspace = wanted.workspace;

-- name: flow_caused_count
-- Returns how many flows one flow caused, up to a limit.
-- params: cause uuid, most bigint
select count(*) as n from (select 1 from flow where flow.cause = :cause {own:flow} limit :most) found;

-- name: flow_set_cause
-- Stores the flow that caused a new flow.
-- params: id uuid, cause uuid
update flow set cause = :cause where flow.id = :id {own:flow};

-- name: event_publish
-- Inserts an event that a user or task publishes.
-- params: id uuid, workspace uuid, name text, data json, cause text, actor text, now timestamptz
{event: seq = 1, kind = 'event', message = :name, data = :data, causation_id = :cause}
returning task as id;

-- name: event_causes
-- Returns the tasks on whose behalf events were published.
-- params: ids uuid[]
select event.task as id, event.causation_id from event
where event.task in (select value from {each:ids}) and event.seq = 1
  and event.causation_id is not null;

-- name: prune_other_events
-- Deletes old events that belong to no task, a bounded number.
-- params: before timestamptz, most bigint
delete from event where (task, seq) in (
  select event.task, event.seq from event
  where event.new is null and event.at < :before limit :most)
returning task as id;
