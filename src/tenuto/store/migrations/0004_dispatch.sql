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

-- Requests and tokens a minute that all workers share. `requests` and `tokens` are what was left
-- at `counted_at`; a null provider, model or account means any.
create table rate_limit (
  workspace uuid not null,
  name text not null,
  provider text,
  model text,
  account text,
  requests_per_minute bigint,
  tokens_per_minute bigint,
  requests double precision not null,
  tokens double precision not null,
  counted_at timestamptz not null,
  created_by text,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  primary key (workspace, name)
);

-- What attempts have used of their models.
create table spending (
  task uuid not null,
  attempt bigint not null,
  model text not null,
  workspace uuid not null,
  agent uuid,
  input_tokens bigint not null,
  output_tokens bigint not null,
  cost_usd double precision not null,
  at timestamptz not null,
  primary key (task, attempt, model)
);

-- Tasks of one key take turns: `held` are those that have a place, the others stand in line.
create table task_turn (
  task uuid primary key,
  workspace uuid not null,
  key text not null,
  most bigint not null,
  held boolean not null
);
create index task_turn_key on task_turn (workspace, key, held, task);

-- Who spawns sessions for us, and since when it cannot.
create table gateway (
  name text primary key,
  failures bigint not null default 0,
  open_until timestamptz,
  last_error text,
  last_ok_at timestamptz,
  updated_at timestamptz not null
);

-- How an agent was, now and then; kept for an hour.
create table agent_health (
  agent uuid not null,
  at timestamptz not null,
  workspace uuid not null,
  status text not null,
  task uuid,
  progress_percent bigint,
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
  taken_at timestamptz
);
create index message_waiting on message (workspace, agent, id) where taken_at is null;
create unique index message_once on message (workspace, agent, client_message_id)
  where client_message_id is not null;

alter table worker add column drain_requested_at timestamptz;
alter table task_body add column depth bigint;

-- only postgres
-- The tables that this migration made, as those before: a tenant sees its own rows, the system all.
do $body$
declare
  name text\;
  own text := '(select nullif(current_setting(''app.workspace'', true), '''')::uuid)'\;
begin
  foreach name in array array['gate', 'rate_limit', 'spending', 'task_turn', 'agent_health',
    'message'] loop
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
