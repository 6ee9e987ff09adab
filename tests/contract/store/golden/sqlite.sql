CREATE TABLE agent (
  id text primary key,
  workspace text not null,
  name text not null,
  profile text not null,
  status text not null check (status in
    ('IDLE', 'WORKING', 'DRAINING', 'STALE', 'ERROR', 'TERMINATED')),
  max_concurrent integer,
  version integer not null default 1,
  created_at integer not null,
  updated_at integer not null,
  seen_at integer, managed integer not null default false, due_at integer,
  unique (workspace, name)
) strict;
CREATE INDEX agent_due on agent (due_at) where due_at is not null;
CREATE TABLE agent_health (
  agent text not null,
  at integer not null,
  workspace text not null,
  status text not null,
  task text,
  progress_percent real,
  current_step text,
  memory_mb real,
  cpu_percent real,
  primary key (agent, at)
) strict;
CREATE INDEX agent_health_age on agent_health (at);
CREATE TABLE app_user (
  id text primary key,
  name text not null,
  password text,
  created_at integer not null,
  disabled_at integer,
  home text
) strict;
CREATE UNIQUE INDEX app_user_bare_name on app_user (name) where home is null;
CREATE UNIQUE INDEX app_user_name on app_user (name, home);
CREATE TABLE artifact (
  task text not null,
  name text not null,
  workspace text not null,
  attempt integer not null,
  type text,
  size integer not null,
  sha256 text not null,
  ref text not null,
  created_at integer not null,
  primary key (task, name)
) strict;
CREATE TABLE attempt (
  task text not null,
  attempt integer not null,
  workspace text not null,
  outcome text not null check (outcome in ('COMPLETED', 'FAILED', 'STALLED', 'ABORTED',
    'TIMED_OUT', 'CANCELLED', 'PARKED', 'PAUSED', 'RELEASED', 'NOT_STARTED')),
  agent text,
  worker text,
  session_key text,
  started_at integer,
  ended_at integer not null,
  error_class text,
  message text,
  stack text,
  exit_code integer,
  tokens text,
  cost_usd real,
  receipt text,
  unconfirmed integer not null default false,
  primary key (task, attempt)
) strict;
CREATE INDEX attempt_lost on attempt (agent, ended_at) where outcome = 'STALLED';
CREATE INDEX attempt_unconfirmed on attempt (agent) where unconfirmed;
CREATE TABLE checkpoint (
  task text primary key,
  workspace text not null,
  seq integer not null,
  attempt integer not null,
  data text not null,
  at integer not null
) strict;
CREATE TABLE child_wait (
  task text not null,
  child text not null,
  workspace text not null,
  primary key (task, child)
) strict;
CREATE INDEX child_wait_child on child_wait (child, task);
CREATE TABLE cursor (
  name text primary key,
  xid integer not null default 0,
  position integer not null default 0,
  updated_at integer not null
) strict;
CREATE TABLE definition (
  id text primary key,
  workspace text not null,
  key text not null,
  kind text not null check (kind in ('task', 'group')),
  spec text not null,
  version integer not null default 1,
  created_at integer not null,
  updated_at integer not null,
  unique (workspace, key)
) strict;
CREATE TABLE event (
  position integer primary key autoincrement,
  task text not null,
  seq integer not null,
  workspace text not null,
  xid integer not null,
  kind text not null,
  level text not null,
  message text,
  previous text,
  new text,
  attempt integer not null,
  agent text,
  actor text,
  session_key text,
  stack_trace text,
  data text,
  trace_id text,
  causation_id text,
  at integer not null
) strict;
CREATE INDEX event_alert on event (position) where level in ('ERROR', 'CRITICAL');
CREATE INDEX event_other on event (at) where new is null;
CREATE UNIQUE INDEX event_task_seq on event (task, seq);
CREATE TABLE flow (
  id text primary key,
  workspace text not null,
  key text not null,
  title text not null,
  status text not null check (status in
    ('RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'CANCELLED')),
  plan text not null,
  input text,
  steps_left integer not null,
  open integer not null,
  failed integer not null default 0,
  priority integer,
  source text,
  fire_key text,
  cause text,
  rerun_of text,
  trace_id text,
  created_by text,
  version integer not null default 1,
  created_at integer not null,
  updated_at integer not null,
  finished_at integer
) strict;
CREATE INDEX flow_cause on flow (cause) where cause is not null;
CREATE UNIQUE INDEX flow_fired on flow (workspace, fire_key) where fire_key is not null;
CREATE INDEX flow_live on flow (workspace, key) where status in ('RUNNING', 'PAUSED');
CREATE INDEX flow_started_by on flow (workspace, source)
  where source is not null and status in ('RUNNING', 'PAUSED');
CREATE INDEX flow_workspace on flow (workspace, id);
CREATE TABLE flow_work (
  id text primary key,
  workspace text not null,
  kind text not null,
  subject text not null,
  data text,
  due_at integer not null
) strict;
CREATE INDEX flow_work_due on flow_work (due_at, id);
CREATE TABLE gate (
  workspace text not null,
  kind text not null check (kind in ('lane', 'agent', 'type', 'workspace')),
  subject text not null,
  reason text,
  until integer,
  created_by text,
  created_at integer not null,
  primary key (workspace, kind, subject)
) strict;
CREATE TABLE gateway (
  name text primary key,
  failures integer not null default 0,
  closed_until integer,
  last_error text,
  last_ok_at integer,
  updated_at integer not null
) strict;
CREATE TABLE idempotency (
  workspace text not null,
  key text not null,
  route text not null,
  fingerprint text not null,
  status integer,
  body text,
  created_at integer not null,
  primary key (workspace, key, route)
) strict;
CREATE INDEX idempotency_old on idempotency (created_at);
CREATE TABLE inbox_item (
  id text primary key,
  workspace text not null,
  task text,
  kind text not null,
  title text not null,
  body text,
  status text not null check (status in ('OPEN', 'APPROVED', 'REJECTED', 'ANSWERED', 'EXPIRED')),
  decision text,
  decided_by text,
  decided_at integer,
  expires_at integer,
  created_at integer not null
, key text, fallback text) strict;
CREATE INDEX inbox_item_open on inbox_item (workspace, id) where status = 'OPEN';
CREATE INDEX inbox_item_task on inbox_item (task) where task is not null;
CREATE TABLE lane (
  id integer primary key,
  workspace text not null,
  key text not null unique,
  closed_until integer,
  closed_why text,
  used_at integer not null
) strict;
CREATE INDEX lane_workspace on lane (workspace);
CREATE TABLE leader (
  name text primary key,
  holder text not null,
  epoch integer not null,
  until integer not null,
  cycles integer not null,
  seen_at integer not null
, led_at integer, data text) strict;
CREATE TABLE member (
  workspace text not null,
  user_id text not null,
  role text not null check (role in ('OWNER', 'ADMIN', 'MEMBER', 'VIEWER')),
  created_at integer not null,
  primary key (workspace, user_id)
) strict;
CREATE INDEX member_user on member (user_id);
CREATE TABLE message (
  id text primary key,
  workspace text not null,
  agent text not null,
  kind text not null,
  scope_key text,
  coalescable integer not null default false,
  client_message_id text,
  batch_id text,
  body text not null,
  task text,
  attempt integer,
  sender text,
  created_at integer not null,
  taken_at integer,
  replaced integer not null default false
) strict;
CREATE INDEX message_age on message (taken_at) where taken_at is not null;
CREATE INDEX message_batch on message (agent, batch_id) where batch_id is not null;
CREATE UNIQUE INDEX message_once on message (workspace, agent, client_message_id)
  where client_message_id is not null;
CREATE INDEX message_task on message (task) where task is not null and taken_at is null;
CREATE INDEX message_waiting on message (workspace, agent, id) where taken_at is null;
CREATE TABLE rate_limit (
  workspace text not null,
  name text not null,
  provider text,
  model text,
  account text,
  requests_per_minute integer,
  tokens_per_minute integer,
  taken text not null,
  tokens real not null,
  counted_at integer not null,
  created_by text,
  created_at integer not null,
  updated_at integer not null,
  primary key (workspace, name)
) strict;
CREATE TABLE schedule (
  id text primary key,
  workspace text not null,
  name text not null,
  target text not null,
  spec text not null,
  input text,
  status text not null check (status in ('ACTIVE', 'PAUSED', 'ENDED')),
  last_at integer not null,
  next_at integer,
  fired integer not null default 0,
  missed integer not null default 0,
  queued text,
  fired_at integer,
  last_flow text,
  last_error text,
  version integer not null default 1,
  created_by text,
  created_at integer not null,
  updated_at integer not null,
  unique (workspace, name)
) strict;
CREATE INDEX schedule_due on schedule (next_at) where status = 'ACTIVE' and next_at is not null;
CREATE INDEX schedule_queued on schedule (updated_at) where status = 'ACTIVE' and queued is not null;
CREATE TABLE schema_migration (
  number bigint primary key, name text not null, compat bigint not null, applied_at text not null
);
CREATE TABLE secret (
  id text primary key,
  workspace text not null,
  name text not null,
  key_id text not null,
  data text not null,
  created_by text,
  created_at integer not null,
  updated_at integer not null, use text,
  unique (workspace, name)
) strict;
CREATE TABLE session (
  id text primary key,
  user_id text not null,
  hash text not null unique,
  created_at integer not null,
  expires_at integer not null,
  revoked_at integer
) strict;
CREATE TABLE spending (
  task text not null,
  attempt integer not null,
  model text not null,
  workspace text not null,
  agent text,
  input_tokens integer not null,
  output_tokens integer not null,
  cost_usd real not null,
  last integer not null default 0,
  at integer not null,
  primary key (task, attempt, model)
) strict;
CREATE INDEX spending_workspace on spending (workspace, at);
CREATE TABLE task (
  id text primary key,
  workspace text not null,
  lane integer not null,
  status text not null,
  hold text,
  unmet integer not null default 0,
  watched integer not null default false,
  rank integer not null,
  priority integer not null,
  version integer not null default 1,
  attempt integer not null default 0,
  tries integer not null default 0,
  free_ends integer not null default 0,
  free_mark integer not null default 0,
  losses integer not null default 0,
  max_attempts integer not null,
  retry text,
  agent text,
  worker text,
  session_key text,
  lease_token text,
  lease_s integer,
  lease_until integer,
  timeout_s integer,
  watch_s integer,
  queue_ttl_s integer,
  estimate_minutes integer,
  cancel_requested_at integer,
  pause_requested_at integer,
  hung_warned_at integer,
  progress_percent integer,
  current_step text,
  progress_at integer,
  estimated_completion_at integer,
  checkpoint_seq integer not null default 0,
  event_xid integer not null default 0,
  run_at integer,
  resume_at integer,
  wait_until integer,
  next_attempt_at integer,
  due_at integer,
  last_error text,
  error_class text,
  last_outcome text,
  created_at integer not null,
  updated_at integer not null,
  assigned_at integer,
  started_at integer,
  finished_at integer,
  archived_at integer, awaited integer not null default 0,
  check (tries <= max_attempts),
  check (status not in ('ASSIGNED', 'RUNNING')
    or (lease_until is not null and lease_token is not null and agent is not null)),
  check (status not in ('COMPLETED', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED')
    or finished_at is not null),
  check (status <> 'RETRY_WAIT' or next_attempt_at is not null)
) strict;
CREATE INDEX task_attention on task (status, id)
  where status in ('WAITING', 'PAUSED', 'RETRY_WAIT', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED');
CREATE INDEX task_due on task (due_at) where due_at is not null;
CREATE INDEX task_due_of on task (workspace, due_at) where due_at is not null;
CREATE INDEX task_leased on task (agent) where status in ('ASSIGNED', 'RUNNING');
CREATE INDEX task_pending on task (lane, rank, id) where status = 'PENDING';
CREATE INDEX task_stopping on task (worker)
  where cancel_requested_at is not null or pause_requested_at is not null;
CREATE TABLE task_body (
  workspace text not null,
  task text not null,
  kind text not null default 'agent'
    check (kind in ('agent', 'foreach', 'goto', 'condition', 'approval')),
  key text,
  definition text,
  flow text,
  activation integer,
  parent text,
  group_id text,
  rerun_of text,
  title text not null,
  description text,
  prompt text,
  system_prompt text,
  model text,
  max_turns integer,
  conversation text,
  task_type text not null,
  agent_type text,
  target_agent text,
  runtime text,
  command text,
  cwd text,
  env text,
  checkout text,
  source text,
  notify text,
  tool_call_id text,
  container text,
  region text,
  tools text,
  complexity text,
  input text,
  metadata text,
  escalation text,
  budget text,
  on_dependency_failure text,
  idempotency_key text,
  fingerprint text,
  trace_id text,
  created_by text, slot integer, follows text, next text, context text, control text, concurrency text, depth integer,
  primary key (workspace, task)
) strict;
CREATE UNIQUE INDEX task_body_flow on task_body (flow, key, activation) where flow is not null;
CREATE INDEX task_body_group on task_body (group_id, slot) where group_id is not null;
CREATE UNIQUE INDEX task_body_idempotency on task_body (workspace, idempotency_key)
  where idempotency_key is not null;
CREATE INDEX task_body_parent on task_body (parent) where parent is not null;
CREATE TABLE task_capability (
  task text not null, workspace text not null, capability text not null,
  primary key (task, capability)
) strict;
CREATE INDEX task_capability_by_name on task_capability (workspace, capability, task);
CREATE TABLE task_dependency (
  task text not null, needs text not null, workspace text not null, met integer not null, failed integer not null default false,
  primary key (task, needs)
) strict;
CREATE INDEX task_dependency_needs on task_dependency (needs, task);
CREATE TABLE task_group (
  id text primary key,
  workspace text not null,
  flow text not null,
  key text not null,
  title text not null,
  activation integer not null,
  parent text,
  slot integer not null,
  kind text not null check (kind in ('sequential', 'parallel')),
  status text not null check (status in
    ('WAITING', 'RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'CANCELLED', 'SKIPPED')),
  join_policy text not null,
  depth integer not null,
  items text,
  total integer not null,
  made integer not null default 0,
  open integer not null,
  succeeded integer not null default 0,
  failed integer not null default 0,
  turn integer,
  follows text,
  context text,
  version integer not null default 1,
  created_at integer not null,
  updated_at integer not null,
  finished_at integer
) strict;
CREATE INDEX task_group_flow on task_group (flow, key, activation);
CREATE INDEX task_group_parent on task_group (parent, slot) where parent is not null;
CREATE INDEX task_group_running on task_group (updated_at) where status = 'RUNNING';
CREATE INDEX task_group_workspace on task_group (workspace, id);
CREATE TABLE task_label (
  task text not null, workspace text not null, label text not null, primary key (task, label)
) strict;
CREATE INDEX task_label_by_name on task_label (workspace, label, task);
CREATE TABLE task_output (
  task text primary key,
  workspace text not null,
  output text,
  output_ref text,
  summary text
) strict;
CREATE TABLE task_secret (
  task text primary key,
  workspace text not null,
  key_id text not null,
  data text not null
) strict;
CREATE TABLE task_step (
  task text not null, workspace text not null, key text not null, attempt integer not null,
  value text, child text, at integer not null,
  primary key (task, key)
) strict;
CREATE TABLE task_tag (
  task text not null, workspace text not null, tag text not null, primary key (task, tag)
) strict;
CREATE INDEX task_tag_by_name on task_tag (workspace, tag, task);
CREATE TABLE task_turn (
  task text primary key,
  workspace text not null,
  key text not null,
  number integer not null,
  most integer not null,
  held integer not null
) strict;
CREATE INDEX task_turn_key on task_turn (workspace, key, held, number, task);
CREATE TABLE token (
  id text primary key,
  workspace text not null,
  user_id text,
  name text not null,
  hash text not null unique,
  role text not null check (role in ('OWNER', 'ADMIN', 'MEMBER', 'VIEWER')),
  scopes text not null,
  agent text,
  created_by text,
  created_at integer not null,
  expires_at integer,
  revoked_at integer
, made_by text) strict;
CREATE INDEX token_made_by on token (made_by) where made_by is not null;
CREATE INDEX token_workspace on token (workspace, id);
CREATE TABLE transcript (
  task text not null,
  attempt integer not null,
  line_no integer not null,
  workspace text not null,
  level text not null,
  text text not null,
  at integer not null,
  primary key (task, attempt, line_no)
) strict;
CREATE TABLE transcript_size (
  task text not null,
  attempt integer not null,
  workspace text not null,
  bytes integer not null,
  primary key (task, attempt)
) strict;
CREATE TABLE trigger_rule (
  id text primary key,
  workspace text not null,
  name text not null,
  event text not null,
  filter text,
  target text not null,
  status text not null check (status in ('ACTIVE', 'PAUSED')),
  active_at integer not null,
  fired integer not null default 0,
  fired_at integer,
  last_flow text,
  last_error text,
  version integer not null default 1,
  created_by text,
  created_at integer not null,
  updated_at integer not null,
  unique (workspace, name)
) strict;
CREATE TABLE turn_key (
  workspace text not null,
  key text not null,
  last integer not null,
  primary key (workspace, key)
) strict;
CREATE TABLE webhook (
  id text primary key,
  workspace text not null,
  url text not null,
  events text not null,
  description text,
  key_id text not null,
  secret text not null,
  enabled integer not null,
  disabled_why text,
  failures integer not null default 0,
  closed_until integer,
  version integer not null default 1,
  created_by text,
  created_at integer not null,
  updated_at integer not null
) strict;
CREATE INDEX webhook_workspace on webhook (workspace, id);
CREATE TABLE webhook_delivery (
  id text primary key,
  workspace text not null,
  webhook text not null,
  task text,
  seq integer,
  event text not null,
  body text not null,
  status text not null check (status in ('PENDING', 'DELIVERED', 'FAILED')),
  attempts integer not null default 0,
  next_attempt_at integer,
  response_status integer,
  error text,
  created_at integer not null,
  delivered_at integer
) strict;
CREATE INDEX webhook_delivery_due on webhook_delivery (webhook, next_attempt_at, id)
  where status = 'PENDING';
CREATE INDEX webhook_delivery_of on webhook_delivery (webhook, id);
CREATE INDEX webhook_delivery_old on webhook_delivery (created_at);
CREATE UNIQUE INDEX webhook_delivery_once on webhook_delivery (webhook, task, seq, event)
  where task is not null;
CREATE TABLE worker (
  workspace text not null,
  id text not null,
  host text not null,
  pid integer not null,
  agents text not null,
  slots integer not null,
  status text not null check (status in ('RUNNING', 'DRAINING', 'STOPPED', 'LOST')),
  started_at integer not null,
  seen_at integer not null, drain_requested_at integer, registered_by text,
  primary key (workspace, id)
) strict;
CREATE TABLE workspace (
  id text primary key,
  name text not null,
  lanes_version integer not null default 1,
  created_at integer not null,
  quota text,
  complexity text,
  origin text
) strict;
CREATE INDEX workspace_name on workspace (name, created_at);
CREATE INDEX workspace_origin on workspace (origin) where origin is not null;
