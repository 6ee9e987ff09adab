-- compat: 3
-- Flows: what runs more than once, in what order, when, and after what.

alter table workspace add column complexity json;

drop table flow;
drop table task_group;
drop table flow_work;

-- One execution of a plan with everything it activates. `open` counts the places at its top that
-- something still runs in, `failed` those that ended badly.
create table flow (
  id uuid primary key,
  workspace uuid not null,
  key text not null,
  title text not null,
  status text not null check (status in
    ('RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'CANCELLED')),
  plan json not null,
  input json,
  steps_left bigint not null,
  open bigint not null,
  failed bigint not null default 0,
  priority smallint,
  source text,
  fire_key text,
  cause uuid,
  rerun_of uuid,
  trace_id text,
  created_by text,
  version bigint not null default 1,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  finished_at timestamptz
);
create index flow_workspace on flow (workspace, id);
create index flow_live on flow (workspace, key) where status in ('RUNNING', 'PAUSED');
-- A schedule's instant and a trigger's event start one flow, however often they are looked at.
create unique index flow_fired on flow (workspace, fire_key) where fire_key is not null;
-- Whether what a schedule started before has ended.
create index flow_started_by on flow (workspace, source)
  where source is not null and status in ('RUNNING', 'PAUSED');
-- `cause` is the first flow of those that triggers started one after the other.
create index flow_cause on flow (cause) where cause is not null;

-- One run of a group. `open` counts children that have not ended, made or still to be made.
create table task_group (
  id uuid primary key,
  workspace uuid not null,
  flow uuid not null,
  key text not null,
  title text not null,
  activation bigint not null,
  parent uuid,
  slot bigint not null,
  kind text not null check (kind in ('sequential', 'parallel')),
  status text not null check (status in
    ('WAITING', 'RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'CANCELLED', 'SKIPPED')),
  join_policy text not null,
  depth bigint not null,
  items json,
  total bigint not null,
  made bigint not null default 0,
  open bigint not null,
  succeeded bigint not null default 0,
  failed bigint not null default 0,
  turn bigint,
  follows uuid,
  context json,
  version bigint not null default 1,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  finished_at timestamptz
);
create index task_group_flow on task_group (flow, key, activation);
create index task_group_parent on task_group (parent, slot) where parent is not null;
create index task_group_workspace on task_group (workspace, id);
create index task_group_running on task_group (updated_at) where status = 'RUNNING';

-- What is left of a cascade too large for one transaction.
create table flow_work (
  id uuid primary key,
  workspace uuid not null,
  kind text not null,
  subject uuid not null,
  data json,
  due_at timestamptz not null
);
create index flow_work_due on flow_work (due_at, id);

-- Where a task stands in its flow, what came before it, and what it adds to what was asked.
alter table task_body add column slot bigint;
alter table task_body add column follows uuid;
alter table task_body add column next text;
alter table task_body add column context json;
alter table task_body add column control json;
create unique index task_body_flow on task_body (flow, key, activation) where flow is not null;
create index task_body_group on task_body (group_id, slot) where group_id is not null;
alter table task_dependency add column failed boolean not null default false;

-- When definitions are started by time.
create table schedule (
  id uuid primary key,
  workspace uuid not null,
  name text not null,
  target text not null,
  spec json not null,
  input json,
  status text not null check (status in ('ACTIVE', 'PAUSED', 'ENDED')),
  last_at timestamptz not null,
  next_at timestamptz,
  fired bigint not null default 0,
  missed bigint not null default 0,
  queued json,
  fired_at timestamptz,
  last_flow uuid,
  last_error text,
  version bigint not null default 1,
  created_by text,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  unique (workspace, name)
);
create index schedule_due on schedule (next_at) where status = 'ACTIVE' and next_at is not null;
create index schedule_queued on schedule (updated_at) where status = 'ACTIVE' and queued is not null;

-- When definitions are started by events: those that came at `active_at` or later.
create table trigger_rule (
  id uuid primary key,
  workspace uuid not null,
  name text not null,
  event text not null,
  filter text,
  target text not null,
  status text not null check (status in ('ACTIVE', 'PAUSED')),
  active_at timestamptz not null,
  fired bigint not null default 0,
  fired_at timestamptz,
  last_flow uuid,
  last_error text,
  version bigint not null default 1,
  created_by text,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  unique (workspace, name)
);
-- Events of no task have no status; their age is all that they are looked up by.
create index event_other on event (at) where new is null;

-- only postgres
-- The tables that this migration made, as those before: a tenant sees its own rows, the system all.
do $body$
declare
  name text\;
  own text := '(select nullif(current_setting(''app.workspace'', true), '''')::uuid)'\;
begin
  foreach name in array array['flow', 'task_group', 'flow_work', 'schedule', 'trigger_rule'] loop
    execute format('alter table %I enable row level security', name)\;
    execute format('alter table %I force row level security', name)\;
    execute format('grant select, insert, update, delete on %I to tenuto_system, tenuto_runtime',
      name)\;
    execute format('create policy system on %I to tenuto_system using (true) with check (true)',
      name)\;
    execute format('create policy tenant on %I to tenuto_runtime using (workspace = %s)'
      ' with check (workspace = %s)', name, own, own)\;
  end loop\;
end $body$;
-- end only
