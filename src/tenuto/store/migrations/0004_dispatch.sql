-- compat: 4
-- Agents and dispatch: what holds lanes back, what agents use, who spawns sessions, who hears what.

-- What an operator holds back: a lane, an agent, a type of task, or the whole workspace.
create table gate (
  workspace uuid not null,
  kind text not null check (kind in ('lane', 'agent', 'type', 'workspace')),
  subject text not null,
  reason text,
  until timestamptz,
  created_by text,
  created_at timestamptz not null,
  primary key (workspace, kind, subject)
);

-- Requests and tokens a minute that all workers share; a null provider, model or account means any.
-- `taken` has the requests of the last minute as [microsecond, number]; `tokens` is what was left of
-- them at `counted_at`, below zero when more were used.
create table rate_limit (
  workspace uuid not null,
  name text not null,
  provider text,
  model text,
  account text,
  requests_per_minute bigint,
  tokens_per_minute bigint,
  taken json not null,
  tokens double precision not null,
  counted_at timestamptz not null,
  created_by text,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  primary key (workspace, name)
);

-- What attempts have used of their models; `last` is the number of the last report that counted.
create table spending (
  task uuid not null,
  attempt bigint not null,
  model text not null,
  workspace uuid not null,
  agent uuid,
  input_tokens bigint not null,
  output_tokens bigint not null,
  cost_usd double precision not null,
  last bigint not null default 0,
  at timestamptz not null,
  primary key (task, attempt, model)
);
create index spending_workspace on spending (workspace, at);

-- A key that tasks share, locked while its places are given; `last` is the last number in its line.
create table turn_key (
  workspace uuid not null,
  key text not null,
  last bigint not null,
  primary key (workspace, key)
);

-- Tasks of one key take turns: `held` are those that have a place, the others stand in line.
create table task_turn (
  task uuid primary key,
  workspace uuid not null,
  key text not null,
  number bigint not null,
  most bigint not null,
  held boolean not null
);
create index task_turn_key on task_turn (workspace, key, held, number, task);
alter table task_body add column concurrency json;

-- How many tasks were ever made to wait for one: where that is none, nobody is looked for at its end.
-- The owner of the tables is bound by their policies, too, and would see no row.
alter table task add column awaited bigint not null default 0;
-- only postgres
alter table task no force row level security;
alter table task_dependency no force row level security;
-- end only
update task set awaited = (select count(*) from task_dependency d where d.needs = task.id)
where task.id in (select d.needs from task_dependency d);
-- only postgres
alter table task force row level security;
alter table task_dependency force row level security;
-- end only

-- Who spawns sessions for us, and since when it cannot.
create table gateway (
  name text primary key,
  failures bigint not null default 0,
  closed_until timestamptz,
  last_error text,
  last_ok_at timestamptz,
  updated_at timestamptz not null
);

-- What is to stop: a coordinator looks for sessions of gateways among it.
create index task_stopping on task (worker)
  where cancel_requested_at is not null or pause_requested_at is not null;

-- How an agent was, now and then; kept for an hour.
create table agent_health (
  agent uuid not null,
  at timestamptz not null,
  workspace uuid not null,
  status text not null,
  task uuid,
  progress_percent double precision,
  current_step text,
  memory_mb double precision,
  cpu_percent double precision,
  primary key (agent, at)
);
create index agent_health_age on agent_health (at);

-- What is said to an agent; never work itself.
create table message (
  id uuid primary key,
  workspace uuid not null,
  agent uuid not null,
  kind text not null,
  scope_key text,
  coalescable boolean not null default false,
  client_message_id text,
  batch_id uuid,
  body json not null,
  task uuid,
  attempt bigint,
  sender text,
  created_at timestamptz not null,
  taken_at timestamptz,
  replaced boolean not null default false
);
create index message_batch on message (agent, batch_id) where batch_id is not null;
create index message_task on message (task) where task is not null and taken_at is null;
create index message_age on message (taken_at) where taken_at is not null;
create index message_waiting on message (workspace, agent, id) where taken_at is null;
create unique index message_once on message (workspace, agent, client_message_id)
  where client_message_id is not null;

-- `managed`: people say what the agent may do, whatever its worker brings. `due_at`: when a
-- coordinator has to look at it, because it fell silent or is to end.
alter table agent add column managed boolean not null default false;
alter table agent add column due_at timestamptz;
create index agent_due on agent (due_at) where due_at is not null;
-- What agents lost by falling silent.
create index attempt_lost on attempt (agent, ended_at) where outcome = 'STALLED';
alter table worker add column drain_requested_at timestamptz;
-- Since when the leader leads, and how its last cycle went.
alter table leader add column led_at timestamptz;
alter table leader add column data json;
-- A workspace's own timers: its turn among others, and a look at it alone.
create index task_due_of on task (workspace, due_at) where due_at is not null;
alter table task_body add column depth bigint;

-- What an attempt gave its slot up for: the children of a waiting task that have not ended.
create table child_wait (
  task uuid not null,
  child uuid not null,
  workspace uuid not null,
  primary key (task, child)
);
create index child_wait_child on child_wait (child, task);

-- What a handler asked people under a key, and the answer if nobody gives one in time.
alter table inbox_item add column key text;
alter table inbox_item add column fallback json;

-- only postgres
-- The tables that this migration made, as those before: a tenant sees its own rows, the system all.
do $body$
declare
  name text\;
  own text := '(select nullif(current_setting(''app.workspace'', true), '''')::uuid)'\;
begin
  foreach name in array array['gate', 'rate_limit', 'spending', 'turn_key', 'task_turn', 'agent_health',
    'message', 'child_wait'] loop
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
alter table gateway enable row level security;
alter table gateway force row level security;
grant select, insert, update, delete on gateway to tenuto_system;
create policy system on gateway to tenuto_system using (true) with check (true);
-- end only
