-- The first schema. Written in PostgreSQL's types; `schema.py` says how SQLite spells them.
-- Lines between `only postgres` / `only sqlite` and `end only` are for that database alone.

create table workspace (
  id uuid primary key,
  name text not null unique,
  lanes_version bigint not null default 1,
  created_at timestamptz not null
);

-- What may run more than once. A task submitted on its own needs none.
create table definition (
  id uuid primary key,
  workspace uuid not null,
  key text not null,
  kind text not null check (kind in ('task', 'group')),
  spec json not null,
  version bigint not null default 1,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  unique (workspace, key)
);

-- One execution of a definition with everything it activates; owns the step budget.
create table flow (
  id uuid primary key,
  workspace uuid not null,
  definition uuid,
  status text not null,
  steps_left bigint not null default 100,
  input json,
  created_at timestamptz not null,
  finished_at timestamptz
);

create table task_group (
  id uuid primary key,
  workspace uuid not null,
  key text,
  definition uuid,
  flow uuid,
  activation bigint not null default 1,
  parent uuid,
  kind text not null check (kind in ('sequential', 'parallel')),
  status text not null check (status in
    ('WAITING', 'RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'CANCELLED', 'SKIPPED')),
  join_policy text not null default 'all_succeeded',
  spec json,
  open_children bigint not null default 0,
  version bigint not null default 1,
  created_at timestamptz not null,
  finished_at timestamptz
);

-- What is left of a cascade too large for one transaction.
create table flow_work (
  id uuid primary key,
  workspace uuid not null,
  kind text not null,
  data json not null,
  due_at timestamptz not null
);

create table agent (
  id uuid primary key,
  workspace uuid not null,
  name text not null,
  profile json not null,
  status text not null check (status in
    ('IDLE', 'WORKING', 'DRAINING', 'STALE', 'ERROR', 'TERMINATED')),
  max_concurrent bigint,
  version bigint not null default 1,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  seen_at timestamptz,
  unique (workspace, name)
);

create table worker (
  workspace uuid not null,
  id text not null,
  host text not null,
  pid bigint not null,
  agents json not null,
  slots bigint not null,
  status text not null check (status in ('RUNNING', 'DRAINING', 'STOPPED', 'LOST')),
  started_at timestamptz not null,
  seen_at timestamptz not null,
  primary key (workspace, id)
);

-- All tasks with the same requirements. `id` follows from `key`.
create table lane (
  id bigint primary key,
  workspace uuid not null,
  key text not null unique,
  closed_until timestamptz,
  closed_why text,
  used_at timestamptz not null
);
create index lane_workspace on lane (workspace);

-- The hot half of a task: what decides and what changes at every transition.
create table task (
  id uuid primary key,
  workspace uuid not null,
  lane bigint not null,
  status text not null,
  hold text,
  unmet bigint not null default 0,
  watched boolean not null default false,
  rank bigint not null,
  priority smallint not null,
  version bigint not null default 1,
  attempt bigint not null default 0,
  tries bigint not null default 0,
  free_ends bigint not null default 0,
  free_mark bigint not null default 0,
  losses bigint not null default 0,
  max_attempts bigint not null,
  retry json,
  agent uuid,
  worker text,
  session_key text,
  lease_token text,
  lease_s bigint,
  lease_until timestamptz,
  timeout_s bigint,
  watch_s bigint,
  queue_ttl_s bigint,
  estimate_minutes bigint,
  cancel_requested_at timestamptz,
  pause_requested_at timestamptz,
  hung_warned_at timestamptz,
  progress_percent smallint,
  current_step text,
  progress_at timestamptz,
  estimated_completion_at timestamptz,
  checkpoint_seq bigint not null default 0,
  event_xid bigint not null default 0,
  run_at timestamptz,
  resume_at timestamptz,
  wait_until timestamptz,
  next_attempt_at timestamptz,
  due_at timestamptz,
  last_error text,
  error_class text,
  last_outcome text,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  assigned_at timestamptz,
  started_at timestamptz,
  finished_at timestamptz,
  archived_at timestamptz,
  check (tries <= max_attempts),
  check (status not in ('ASSIGNED', 'RUNNING')
    or (lease_until is not null and lease_token is not null and agent is not null)),
  check (status not in ('COMPLETED', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED')
    or finished_at is not null),
  check (status <> 'RETRY_WAIT' or next_attempt_at is not null)
);
-- The queue itself.
create index task_pending on task (lane, rank, id) where status = 'PENDING';
-- What is held: the reaper's scan and an agent's capacity.
create index task_leased on task (agent) where status in ('ASSIGNED', 'RUNNING');
-- What a person looks for; a task that just runs through never enters it.
create index task_attention on task (status, id)
  where status in ('WAITING', 'PAUSED', 'RETRY_WAIT', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED');
-- The one timer index.
create index task_due on task (due_at) where due_at is not null;

-- The cold half: what was asked for. Written once, read when an attempt starts or a person looks.
create table task_body (
  workspace uuid not null,
  task uuid not null,
  kind text not null default 'agent'
    check (kind in ('agent', 'foreach', 'goto', 'condition', 'approval')),
  key text,
  definition uuid,
  flow uuid,
  activation bigint,
  parent uuid,
  group_id uuid,
  rerun_of uuid,
  title text not null,
  description text,
  prompt text,
  system_prompt text,
  model text,
  max_turns bigint,
  conversation text,
  task_type text not null,
  agent_type text,
  target_agent uuid,
  runtime text,
  command json,
  cwd text,
  env json,
  checkout json,
  source text,
  notify json,
  tool_call_id text,
  container text,
  region text,
  tools json,
  complexity text,
  input json,
  metadata json,
  escalation json,
  budget json,
  on_dependency_failure text,
  idempotency_key text,
  fingerprint text,
  trace_id text,
  created_by text,
  primary key (workspace, task)
);
create unique index task_body_idempotency on task_body (workspace, idempotency_key)
  where idempotency_key is not null;
create index task_body_parent on task_body (parent) where parent is not null;

create table task_output (
  task uuid primary key,
  workspace uuid not null,
  output json,
  output_ref text,
  summary text
);

create table checkpoint (
  task uuid primary key,
  workspace uuid not null,
  seq bigint not null,
  attempt bigint not null,
  data json not null,
  at timestamptz not null
);

create table task_label (
  task uuid not null, workspace uuid not null, label text not null, primary key (task, label)
);
create index task_label_by_name on task_label (workspace, label, task);
create table task_tag (
  task uuid not null, workspace uuid not null, tag text not null, primary key (task, tag)
);
create index task_tag_by_name on task_tag (workspace, tag, task);
create table task_capability (
  task uuid not null, workspace uuid not null, capability text not null,
  primary key (task, capability)
);
create index task_capability_by_name on task_capability (workspace, capability, task);

create table task_dependency (
  task uuid not null, needs uuid not null, workspace uuid not null, met boolean not null,
  primary key (task, needs)
);
create index task_dependency_needs on task_dependency (needs, task);

-- What a handler did once and must not do again, by its key.
create table task_step (
  task uuid not null, workspace uuid not null, key text not null, attempt bigint not null,
  value json, child uuid, at timestamptz not null,
  primary key (task, key)
);

-- One row per attempt, written when it ends; the running attempt is in the task's own row.
create table attempt (
  task uuid not null,
  attempt bigint not null,
  workspace uuid not null,
  outcome text not null check (outcome in ('COMPLETED', 'FAILED', 'STALLED', 'ABORTED',
    'TIMED_OUT', 'CANCELLED', 'PARKED', 'PAUSED', 'RELEASED', 'NOT_STARTED')),
  agent uuid,
  worker text,
  session_key text,
  started_at timestamptz,
  ended_at timestamptz not null,
  error_class text,
  message text,
  stack text,
  exit_code bigint,
  tokens json,
  cost_usd double precision,
  receipt json,
  unconfirmed boolean not null default false,
  primary key (task, attempt)
);
create index attempt_unconfirmed on attempt (agent) where unconfirmed;

create table transcript (
  task uuid not null,
  attempt bigint not null,
  line_no bigint not null,
  workspace uuid not null,
  level text not null,
  text text not null,
  at timestamptz not null,
  primary key (task, attempt, line_no)
);

create table artifact (
  task uuid not null,
  name text not null,
  workspace uuid not null,
  attempt bigint not null,
  type text,
  size bigint not null,
  sha256 text not null,
  ref text not null,
  created_at timestamptz not null,
  primary key (task, name)
);

-- only postgres
create table event (
  task uuid not null,
  seq bigint not null,
  workspace uuid not null,
  position bigint generated always as identity,
  xid bigint not null,
  kind text not null,
  level text not null,
  message text,
  previous text,
  new text,
  attempt bigint not null,
  agent uuid,
  actor text,
  session_key text,
  stack_trace text,
  data json,
  trace_id text,
  causation_id text,
  at timestamptz not null,
  primary key (task, seq)
);
create index event_order on event (xid, position);
create index event_at on event using brin (at);
create index event_alert on event (xid, position) where level in ('ERROR', 'CRITICAL');
alter table task set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.05);
-- end only
-- only sqlite
create table event (
  position integer primary key autoincrement,
  task uuid not null,
  seq bigint not null,
  workspace uuid not null,
  xid bigint not null,
  kind text not null,
  level text not null,
  message text,
  previous text,
  new text,
  attempt bigint not null,
  agent uuid,
  actor text,
  session_key text,
  stack_trace text,
  data json,
  trace_id text,
  causation_id text,
  at timestamptz not null
);
create unique index event_task_seq on event (task, seq);
create index event_alert on event (position) where level in ('ERROR', 'CRITICAL');
-- end only

-- Who saves work by being the only one to do a duty. Correctness never depends on it.
create table leader (
  name text primary key,
  holder text not null,
  epoch bigint not null,
  until timestamptz not null,
  cycles bigint not null,
  seen_at timestamptz not null
);

-- How far each subscriber has read the events.
create table cursor (
  name text primary key,
  xid bigint not null default 0,
  position bigint not null default 0,
  updated_at timestamptz not null
);

insert into workspace (id, name, created_at)
values ('00000000-0000-7000-8000-000000000001', 'default', {epoch});
