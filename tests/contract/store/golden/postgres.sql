table agent
  id uuid not null
  workspace uuid not null
  name text not null
  profile json not null
  status text not null
  max_concurrent bigint
  version bigint not null default 1
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
  seen_at timestamp with time zone
  managed boolean not null default false
  due_at timestamp with time zone
table agent_health
  agent uuid not null
  at timestamp with time zone not null
  workspace uuid not null
  status text not null
  task uuid
  progress_percent double precision
  current_step text
  memory_mb double precision
  cpu_percent double precision
table app_user
  id uuid not null
  name text not null
  password text
  created_at timestamp with time zone not null
  disabled_at timestamp with time zone
  home uuid
table artifact
  task uuid not null
  name text not null
  workspace uuid not null
  attempt bigint not null
  type text
  size bigint not null
  sha256 text not null
  ref text not null
  created_at timestamp with time zone not null
table attempt
  task uuid not null
  attempt bigint not null
  workspace uuid not null
  outcome text not null
  agent uuid
  worker text
  session_key text
  started_at timestamp with time zone
  ended_at timestamp with time zone not null
  error_class text
  message text
  stack text
  exit_code bigint
  tokens json
  cost_usd double precision
  receipt json
  unconfirmed boolean not null default false
table checkpoint
  task uuid not null
  workspace uuid not null
  seq bigint not null
  attempt bigint not null
  data json not null
  at timestamp with time zone not null
table child_wait
  task uuid not null
  child uuid not null
  workspace uuid not null
table cursor
  name text not null
  xid bigint not null default 0
  position bigint not null default 0
  updated_at timestamp with time zone not null
table definition
  id uuid not null
  workspace uuid not null
  key text not null
  kind text not null
  spec json not null
  version bigint not null default 1
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
table event
  task uuid not null
  seq bigint not null
  workspace uuid not null
  position bigint not null identity
  xid bigint not null
  kind text not null
  level text not null
  message text
  previous text
  new text
  attempt bigint not null
  agent uuid
  actor text
  session_key text
  stack_trace text
  data json
  trace_id text
  causation_id text
  at timestamp with time zone not null
table flow
  id uuid not null
  workspace uuid not null
  key text not null
  title text not null
  status text not null
  plan json not null
  input json
  steps_left bigint not null
  open bigint not null
  failed bigint not null default 0
  priority smallint
  source text
  fire_key text
  cause uuid
  rerun_of uuid
  trace_id text
  created_by text
  version bigint not null default 1
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
  finished_at timestamp with time zone
table flow_work
  id uuid not null
  workspace uuid not null
  kind text not null
  subject uuid not null
  data json
  due_at timestamp with time zone not null
table gate
  workspace uuid not null
  kind text not null
  subject text not null
  reason text
  until timestamp with time zone
  created_by text
  created_at timestamp with time zone not null
table gateway
  name text not null
  failures bigint not null default 0
  closed_until timestamp with time zone
  last_error text
  last_ok_at timestamp with time zone
  updated_at timestamp with time zone not null
table idempotency
  workspace uuid not null
  key text not null
  route text not null
  fingerprint text not null
  status bigint
  body text
  created_at timestamp with time zone not null
table inbox_item
  id uuid not null
  workspace uuid not null
  task uuid
  kind text not null
  title text not null
  body json
  status text not null
  decision json
  decided_by text
  decided_at timestamp with time zone
  expires_at timestamp with time zone
  created_at timestamp with time zone not null
  key text
  fallback json
table lane
  id bigint not null
  workspace uuid not null
  key text not null
  closed_until timestamp with time zone
  closed_why text
  used_at timestamp with time zone not null
table leader
  name text not null
  holder text not null
  epoch bigint not null
  until timestamp with time zone not null
  cycles bigint not null
  seen_at timestamp with time zone not null
  led_at timestamp with time zone
  data json
table member
  workspace uuid not null
  user_id uuid not null
  role text not null
  created_at timestamp with time zone not null
table message
  id uuid not null
  workspace uuid not null
  agent uuid not null
  kind text not null
  scope_key text
  coalescable boolean not null default false
  client_message_id text
  batch_id uuid
  body json not null
  task uuid
  attempt bigint
  sender text
  created_at timestamp with time zone not null
  taken_at timestamp with time zone
  replaced boolean not null default false
table rate_limit
  workspace uuid not null
  name text not null
  provider text
  model text
  account text
  requests_per_minute bigint
  tokens_per_minute bigint
  taken json not null
  tokens double precision not null
  counted_at timestamp with time zone not null
  created_by text
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
table schedule
  id uuid not null
  workspace uuid not null
  name text not null
  target text not null
  spec json not null
  input json
  status text not null
  last_at timestamp with time zone not null
  next_at timestamp with time zone
  fired bigint not null default 0
  missed bigint not null default 0
  queued json
  fired_at timestamp with time zone
  last_flow uuid
  last_error text
  version bigint not null default 1
  created_by text
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
table schema_migration
  number bigint not null
  name text not null
  compat bigint not null
  applied_at text not null
table secret
  id uuid not null
  workspace uuid not null
  name text not null
  key_id text not null
  data text not null
  created_by text
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
  use json
table session
  id uuid not null
  user_id uuid not null
  hash text not null
  created_at timestamp with time zone not null
  expires_at timestamp with time zone not null
  revoked_at timestamp with time zone
table spending
  task uuid not null
  attempt bigint not null
  model text not null
  workspace uuid not null
  agent uuid
  input_tokens bigint not null
  output_tokens bigint not null
  cost_usd double precision not null
  last bigint not null default 0
  at timestamp with time zone not null
table task
  id uuid not null
  workspace uuid not null
  lane bigint not null
  status text not null
  hold text
  unmet bigint not null default 0
  watched boolean not null default false
  rank bigint not null
  priority smallint not null
  version bigint not null default 1
  attempt bigint not null default 0
  tries bigint not null default 0
  free_ends bigint not null default 0
  free_mark bigint not null default 0
  losses bigint not null default 0
  max_attempts bigint not null
  retry json
  agent uuid
  worker text
  session_key text
  lease_token text
  lease_s bigint
  lease_until timestamp with time zone
  timeout_s bigint
  watch_s bigint
  queue_ttl_s bigint
  estimate_minutes bigint
  cancel_requested_at timestamp with time zone
  pause_requested_at timestamp with time zone
  hung_warned_at timestamp with time zone
  progress_percent smallint
  current_step text
  progress_at timestamp with time zone
  estimated_completion_at timestamp with time zone
  checkpoint_seq bigint not null default 0
  event_xid bigint not null default 0
  run_at timestamp with time zone
  resume_at timestamp with time zone
  wait_until timestamp with time zone
  next_attempt_at timestamp with time zone
  due_at timestamp with time zone
  last_error text
  error_class text
  last_outcome text
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
  assigned_at timestamp with time zone
  started_at timestamp with time zone
  finished_at timestamp with time zone
  archived_at timestamp with time zone
  awaited bigint not null default 0
table task_body
  workspace uuid not null
  task uuid not null
  kind text not null default 'agent'::text
  key text
  definition uuid
  flow uuid
  activation bigint
  parent uuid
  group_id uuid
  rerun_of uuid
  title text not null
  description text
  prompt text
  system_prompt text
  model text
  max_turns bigint
  conversation text
  task_type text not null
  agent_type text
  target_agent uuid
  runtime text
  command json
  cwd text
  env json
  checkout json
  source text
  notify json
  tool_call_id text
  container text
  region text
  tools json
  complexity text
  input json
  metadata json
  escalation json
  budget json
  on_dependency_failure text
  idempotency_key text
  fingerprint text
  trace_id text
  created_by text
  slot bigint
  follows uuid
  next text
  context json
  control json
  concurrency json
  depth bigint
table task_capability
  task uuid not null
  workspace uuid not null
  capability text not null
table task_dependency
  task uuid not null
  needs uuid not null
  workspace uuid not null
  met boolean not null
  failed boolean not null default false
table task_group
  id uuid not null
  workspace uuid not null
  flow uuid not null
  key text not null
  title text not null
  activation bigint not null
  parent uuid
  slot bigint not null
  kind text not null
  status text not null
  join_policy text not null
  depth bigint not null
  items json
  total bigint not null
  made bigint not null default 0
  open bigint not null
  succeeded bigint not null default 0
  failed bigint not null default 0
  turn bigint
  follows uuid
  context json
  version bigint not null default 1
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
  finished_at timestamp with time zone
table task_label
  task uuid not null
  workspace uuid not null
  label text not null
table task_output
  task uuid not null
  workspace uuid not null
  output json
  output_ref text
  summary text
table task_secret
  task uuid not null
  workspace uuid not null
  key_id text not null
  data text not null
table task_step
  task uuid not null
  workspace uuid not null
  key text not null
  attempt bigint not null
  value json
  child uuid
  at timestamp with time zone not null
table task_tag
  task uuid not null
  workspace uuid not null
  tag text not null
table task_turn
  task uuid not null
  workspace uuid not null
  key text not null
  number bigint not null
  most bigint not null
  held boolean not null
table token
  id uuid not null
  workspace uuid not null
  user_id uuid
  name text not null
  hash text not null
  role text not null
  scopes json not null
  agent uuid
  created_by text
  created_at timestamp with time zone not null
  expires_at timestamp with time zone
  revoked_at timestamp with time zone
  made_by uuid
table transcript
  task uuid not null
  attempt bigint not null
  line_no bigint not null
  workspace uuid not null
  level text not null
  text text not null
  at timestamp with time zone not null
table transcript_size
  task uuid not null
  attempt bigint not null
  workspace uuid not null
  bytes bigint not null
table trigger_rule
  id uuid not null
  workspace uuid not null
  name text not null
  event text not null
  filter text
  target text not null
  status text not null
  active_at timestamp with time zone not null
  fired bigint not null default 0
  fired_at timestamp with time zone
  last_flow uuid
  last_error text
  version bigint not null default 1
  created_by text
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
table turn_key
  workspace uuid not null
  key text not null
  last bigint not null
table webhook
  id uuid not null
  workspace uuid not null
  url text not null
  events json not null
  description text
  key_id text not null
  secret text not null
  enabled boolean not null
  disabled_why text
  failures bigint not null default 0
  closed_until timestamp with time zone
  version bigint not null default 1
  created_by text
  created_at timestamp with time zone not null
  updated_at timestamp with time zone not null
table webhook_delivery
  id uuid not null
  workspace uuid not null
  webhook uuid not null
  task uuid
  seq bigint
  event text not null
  body text not null
  status text not null
  attempts bigint not null default 0
  next_attempt_at timestamp with time zone
  response_status bigint
  error text
  created_at timestamp with time zone not null
  delivered_at timestamp with time zone
table worker
  workspace uuid not null
  id text not null
  host text not null
  pid bigint not null
  agents json not null
  slots bigint not null
  status text not null
  started_at timestamp with time zone not null
  seen_at timestamp with time zone not null
  drain_requested_at timestamp with time zone
  registered_by uuid
table workspace
  id uuid not null
  name text not null
  lanes_version bigint not null default 1
  created_at timestamp with time zone not null
  quota json
  complexity json
  origin uuid
constraint agent_pkey on agent PRIMARY KEY (id)
constraint agent_status_check on agent CHECK ((status = ANY (ARRAY['IDLE'::text, 'WORKING'::text, 'DRAINING'::text, 'STALE'::text, 'ERROR'::text, 'TERMINATED'::text])))
constraint agent_workspace_name_key on agent UNIQUE (workspace, name)
constraint agent_health_pkey on agent_health PRIMARY KEY (agent, at)
constraint app_user_pkey on app_user PRIMARY KEY (id)
constraint artifact_pkey on artifact PRIMARY KEY (task, name)
constraint attempt_outcome_check on attempt CHECK ((outcome = ANY (ARRAY['COMPLETED'::text, 'FAILED'::text, 'STALLED'::text, 'ABORTED'::text, 'TIMED_OUT'::text, 'CANCELLED'::text, 'PARKED'::text, 'PAUSED'::text, 'RELEASED'::text, 'NOT_STARTED'::text])))
constraint attempt_pkey on attempt PRIMARY KEY (task, attempt)
constraint checkpoint_pkey on checkpoint PRIMARY KEY (task)
constraint child_wait_pkey on child_wait PRIMARY KEY (task, child)
constraint cursor_pkey on cursor PRIMARY KEY (name)
constraint definition_kind_check on definition CHECK ((kind = ANY (ARRAY['task'::text, 'group'::text])))
constraint definition_pkey on definition PRIMARY KEY (id)
constraint definition_workspace_key_key on definition UNIQUE (workspace, key)
constraint event_pkey on event PRIMARY KEY (task, seq)
constraint flow_pkey on flow PRIMARY KEY (id)
constraint flow_status_check on flow CHECK ((status = ANY (ARRAY['RUNNING'::text, 'PAUSED'::text, 'COMPLETED'::text, 'FAILED'::text, 'CANCELLED'::text])))
constraint flow_work_pkey on flow_work PRIMARY KEY (id)
constraint gate_kind_check on gate CHECK ((kind = ANY (ARRAY['lane'::text, 'agent'::text, 'type'::text, 'workspace'::text])))
constraint gate_pkey on gate PRIMARY KEY (workspace, kind, subject)
constraint gateway_pkey on gateway PRIMARY KEY (name)
constraint idempotency_pkey on idempotency PRIMARY KEY (workspace, key, route)
constraint inbox_item_pkey on inbox_item PRIMARY KEY (id)
constraint inbox_item_status_check on inbox_item CHECK ((status = ANY (ARRAY['OPEN'::text, 'APPROVED'::text, 'REJECTED'::text, 'ANSWERED'::text, 'EXPIRED'::text])))
constraint lane_key_key on lane UNIQUE (key)
constraint lane_pkey on lane PRIMARY KEY (id)
constraint leader_pkey on leader PRIMARY KEY (name)
constraint member_pkey on member PRIMARY KEY (workspace, user_id)
constraint member_role_check on member CHECK ((role = ANY (ARRAY['OWNER'::text, 'ADMIN'::text, 'MEMBER'::text, 'VIEWER'::text])))
constraint message_pkey on message PRIMARY KEY (id)
constraint rate_limit_pkey on rate_limit PRIMARY KEY (workspace, name)
constraint schedule_pkey on schedule PRIMARY KEY (id)
constraint schedule_status_check on schedule CHECK ((status = ANY (ARRAY['ACTIVE'::text, 'PAUSED'::text, 'ENDED'::text])))
constraint schedule_workspace_name_key on schedule UNIQUE (workspace, name)
constraint schema_migration_pkey on schema_migration PRIMARY KEY (number)
constraint secret_pkey on secret PRIMARY KEY (id)
constraint secret_workspace_name_key on secret UNIQUE (workspace, name)
constraint session_hash_key on session UNIQUE (hash)
constraint session_pkey on session PRIMARY KEY (id)
constraint spending_pkey on spending PRIMARY KEY (task, attempt, model)
constraint task_check on task CHECK ((tries <= max_attempts))
constraint task_pkey on task PRIMARY KEY (id)
constraint task_body_pkey on task_body PRIMARY KEY (workspace, task)
constraint task_capability_pkey on task_capability PRIMARY KEY (task, capability)
constraint task_dependency_pkey on task_dependency PRIMARY KEY (task, needs)
constraint task_group_kind_check on task_group CHECK ((kind = ANY (ARRAY['sequential'::text, 'parallel'::text])))
constraint task_group_pkey on task_group PRIMARY KEY (id)
constraint task_group_status_check on task_group CHECK ((status = ANY (ARRAY['WAITING'::text, 'RUNNING'::text, 'PAUSED'::text, 'COMPLETED'::text, 'FAILED'::text, 'CANCELLED'::text, 'SKIPPED'::text])))
constraint task_label_pkey on task_label PRIMARY KEY (task, label)
constraint task_output_pkey on task_output PRIMARY KEY (task)
constraint task_secret_pkey on task_secret PRIMARY KEY (task)
constraint task_step_pkey on task_step PRIMARY KEY (task, key)
constraint task_tag_pkey on task_tag PRIMARY KEY (task, tag)
constraint task_turn_pkey on task_turn PRIMARY KEY (task)
constraint token_hash_key on token UNIQUE (hash)
constraint token_pkey on token PRIMARY KEY (id)
constraint token_role_check on token CHECK ((role = ANY (ARRAY['OWNER'::text, 'ADMIN'::text, 'MEMBER'::text, 'VIEWER'::text])))
constraint transcript_pkey on transcript PRIMARY KEY (task, attempt, line_no)
constraint transcript_size_pkey on transcript_size PRIMARY KEY (task, attempt)
constraint trigger_rule_pkey on trigger_rule PRIMARY KEY (id)
constraint trigger_rule_status_check on trigger_rule CHECK ((status = ANY (ARRAY['ACTIVE'::text, 'PAUSED'::text])))
constraint trigger_rule_workspace_name_key on trigger_rule UNIQUE (workspace, name)
constraint turn_key_pkey on turn_key PRIMARY KEY (workspace, key)
constraint webhook_pkey on webhook PRIMARY KEY (id)
constraint webhook_delivery_pkey on webhook_delivery PRIMARY KEY (id)
constraint webhook_delivery_status_check on webhook_delivery CHECK ((status = ANY (ARRAY['PENDING'::text, 'DELIVERED'::text, 'FAILED'::text])))
constraint worker_pkey on worker PRIMARY KEY (workspace, id)
constraint worker_status_check on worker CHECK ((status = ANY (ARRAY['RUNNING'::text, 'DRAINING'::text, 'STOPPED'::text, 'LOST'::text])))
constraint workspace_pkey on workspace PRIMARY KEY (id)
CREATE INDEX agent_due ON public.agent USING btree (due_at) WHERE (due_at IS NOT NULL)
CREATE INDEX agent_health_age ON public.agent_health USING btree (at)
CREATE UNIQUE INDEX agent_health_pkey ON public.agent_health USING btree (agent, at)
CREATE UNIQUE INDEX agent_pkey ON public.agent USING btree (id)
CREATE UNIQUE INDEX agent_workspace_name_key ON public.agent USING btree (workspace, name)
CREATE UNIQUE INDEX app_user_bare_name ON public.app_user USING btree (name) WHERE (home IS NULL)
CREATE UNIQUE INDEX app_user_name ON public.app_user USING btree (name, home)
CREATE UNIQUE INDEX app_user_pkey ON public.app_user USING btree (id)
CREATE UNIQUE INDEX artifact_pkey ON public.artifact USING btree (task, name)
CREATE INDEX attempt_lost ON public.attempt USING btree (agent, ended_at) WHERE (outcome = 'STALLED'::text)
CREATE UNIQUE INDEX attempt_pkey ON public.attempt USING btree (task, attempt)
CREATE INDEX attempt_unconfirmed ON public.attempt USING btree (agent) WHERE unconfirmed
CREATE UNIQUE INDEX checkpoint_pkey ON public.checkpoint USING btree (task)
CREATE INDEX child_wait_child ON public.child_wait USING btree (child, task)
CREATE UNIQUE INDEX child_wait_pkey ON public.child_wait USING btree (task, child)
CREATE UNIQUE INDEX cursor_pkey ON public.cursor USING btree (name)
CREATE UNIQUE INDEX definition_pkey ON public.definition USING btree (id)
CREATE UNIQUE INDEX definition_workspace_key_key ON public.definition USING btree (workspace, key)
CREATE INDEX event_alert ON public.event USING btree (xid, "position") WHERE (level = ANY (ARRAY['ERROR'::text, 'CRITICAL'::text]))
CREATE INDEX event_at ON public.event USING brin (at)
CREATE INDEX event_order ON public.event USING btree (xid, "position")
CREATE INDEX event_other ON public.event USING btree (at) WHERE (new IS NULL)
CREATE UNIQUE INDEX event_pkey ON public.event USING btree (task, seq)
CREATE INDEX flow_cause ON public.flow USING btree (cause) WHERE (cause IS NOT NULL)
CREATE UNIQUE INDEX flow_fired ON public.flow USING btree (workspace, fire_key) WHERE (fire_key IS NOT NULL)
CREATE INDEX flow_live ON public.flow USING btree (workspace, key) WHERE (status = ANY (ARRAY['RUNNING'::text, 'PAUSED'::text]))
CREATE UNIQUE INDEX flow_pkey ON public.flow USING btree (id)
CREATE INDEX flow_started_by ON public.flow USING btree (workspace, source) WHERE ((source IS NOT NULL) AND (status = ANY (ARRAY['RUNNING'::text, 'PAUSED'::text])))
CREATE INDEX flow_work_due ON public.flow_work USING btree (due_at, id)
CREATE UNIQUE INDEX flow_work_pkey ON public.flow_work USING btree (id)
CREATE INDEX flow_workspace ON public.flow USING btree (workspace, id)
CREATE UNIQUE INDEX gate_pkey ON public.gate USING btree (workspace, kind, subject)
CREATE UNIQUE INDEX gateway_pkey ON public.gateway USING btree (name)
CREATE INDEX idempotency_old ON public.idempotency USING btree (created_at)
CREATE UNIQUE INDEX idempotency_pkey ON public.idempotency USING btree (workspace, key, route)
CREATE INDEX inbox_item_open ON public.inbox_item USING btree (workspace, id) WHERE (status = 'OPEN'::text)
CREATE UNIQUE INDEX inbox_item_pkey ON public.inbox_item USING btree (id)
CREATE INDEX inbox_item_task ON public.inbox_item USING btree (task) WHERE (task IS NOT NULL)
CREATE UNIQUE INDEX lane_key_key ON public.lane USING btree (key)
CREATE UNIQUE INDEX lane_pkey ON public.lane USING btree (id)
CREATE INDEX lane_workspace ON public.lane USING btree (workspace)
CREATE UNIQUE INDEX leader_pkey ON public.leader USING btree (name)
CREATE UNIQUE INDEX member_pkey ON public.member USING btree (workspace, user_id)
CREATE INDEX member_user ON public.member USING btree (user_id)
CREATE INDEX message_age ON public.message USING btree (taken_at) WHERE (taken_at IS NOT NULL)
CREATE INDEX message_batch ON public.message USING btree (agent, batch_id) WHERE (batch_id IS NOT NULL)
CREATE UNIQUE INDEX message_once ON public.message USING btree (workspace, agent, client_message_id) WHERE (client_message_id IS NOT NULL)
CREATE UNIQUE INDEX message_pkey ON public.message USING btree (id)
CREATE INDEX message_task ON public.message USING btree (task) WHERE ((task IS NOT NULL) AND (taken_at IS NULL))
CREATE INDEX message_waiting ON public.message USING btree (workspace, agent, id) WHERE (taken_at IS NULL)
CREATE UNIQUE INDEX rate_limit_pkey ON public.rate_limit USING btree (workspace, name)
CREATE INDEX schedule_due ON public.schedule USING btree (next_at) WHERE ((status = 'ACTIVE'::text) AND (next_at IS NOT NULL))
CREATE UNIQUE INDEX schedule_pkey ON public.schedule USING btree (id)
CREATE INDEX schedule_queued ON public.schedule USING btree (updated_at) WHERE ((status = 'ACTIVE'::text) AND (queued IS NOT NULL))
CREATE UNIQUE INDEX schedule_workspace_name_key ON public.schedule USING btree (workspace, name)
CREATE UNIQUE INDEX schema_migration_pkey ON public.schema_migration USING btree (number)
CREATE UNIQUE INDEX secret_pkey ON public.secret USING btree (id)
CREATE UNIQUE INDEX secret_workspace_name_key ON public.secret USING btree (workspace, name)
CREATE UNIQUE INDEX session_hash_key ON public.session USING btree (hash)
CREATE UNIQUE INDEX session_pkey ON public.session USING btree (id)
CREATE UNIQUE INDEX spending_pkey ON public.spending USING btree (task, attempt, model)
CREATE INDEX spending_workspace ON public.spending USING btree (workspace, at)
CREATE INDEX task_attention ON public.task USING btree (status, id) WHERE (status = ANY (ARRAY['WAITING'::text, 'PAUSED'::text, 'RETRY_WAIT'::text, 'FAILED'::text, 'DEAD'::text, 'CANCELLED'::text, 'SKIPPED'::text]))
CREATE UNIQUE INDEX task_body_flow ON public.task_body USING btree (flow, key, activation) WHERE (flow IS NOT NULL)
CREATE INDEX task_body_group ON public.task_body USING btree (group_id, slot) WHERE (group_id IS NOT NULL)
CREATE UNIQUE INDEX task_body_idempotency ON public.task_body USING btree (workspace, idempotency_key) WHERE (idempotency_key IS NOT NULL)
CREATE INDEX task_body_parent ON public.task_body USING btree (parent) WHERE (parent IS NOT NULL)
CREATE UNIQUE INDEX task_body_pkey ON public.task_body USING btree (workspace, task)
CREATE INDEX task_capability_by_name ON public.task_capability USING btree (workspace, capability, task)
CREATE UNIQUE INDEX task_capability_pkey ON public.task_capability USING btree (task, capability)
CREATE INDEX task_dependency_needs ON public.task_dependency USING btree (needs, task)
CREATE UNIQUE INDEX task_dependency_pkey ON public.task_dependency USING btree (task, needs)
CREATE INDEX task_due ON public.task USING btree (due_at) WHERE (due_at IS NOT NULL)
CREATE INDEX task_due_of ON public.task USING btree (workspace, due_at) WHERE (due_at IS NOT NULL)
CREATE INDEX task_group_flow ON public.task_group USING btree (flow, key, activation)
CREATE INDEX task_group_parent ON public.task_group USING btree (parent, slot) WHERE (parent IS NOT NULL)
CREATE UNIQUE INDEX task_group_pkey ON public.task_group USING btree (id)
CREATE INDEX task_group_running ON public.task_group USING btree (updated_at) WHERE (status = 'RUNNING'::text)
CREATE INDEX task_group_workspace ON public.task_group USING btree (workspace, id)
CREATE INDEX task_label_by_name ON public.task_label USING btree (workspace, label, task)
CREATE UNIQUE INDEX task_label_pkey ON public.task_label USING btree (task, label)
CREATE INDEX task_leased ON public.task USING btree (agent) WHERE (status = ANY (ARRAY['ASSIGNED'::text, 'RUNNING'::text]))
CREATE UNIQUE INDEX task_output_pkey ON public.task_output USING btree (task)
CREATE INDEX task_pending ON public.task USING btree (lane, rank, id) WHERE (status = 'PENDING'::text)
CREATE UNIQUE INDEX task_pkey ON public.task USING btree (id)
CREATE UNIQUE INDEX task_secret_pkey ON public.task_secret USING btree (task)
CREATE UNIQUE INDEX task_step_pkey ON public.task_step USING btree (task, key)
CREATE INDEX task_stopping ON public.task USING btree (worker) WHERE ((cancel_requested_at IS NOT NULL) OR (pause_requested_at IS NOT NULL))
CREATE INDEX task_tag_by_name ON public.task_tag USING btree (workspace, tag, task)
CREATE UNIQUE INDEX task_tag_pkey ON public.task_tag USING btree (task, tag)
CREATE INDEX task_turn_key ON public.task_turn USING btree (workspace, key, held, number, task)
CREATE UNIQUE INDEX task_turn_pkey ON public.task_turn USING btree (task)
CREATE UNIQUE INDEX token_hash_key ON public.token USING btree (hash)
CREATE INDEX token_made_by ON public.token USING btree (made_by) WHERE (made_by IS NOT NULL)
CREATE UNIQUE INDEX token_pkey ON public.token USING btree (id)
CREATE INDEX token_workspace ON public.token USING btree (workspace, id)
CREATE UNIQUE INDEX transcript_pkey ON public.transcript USING btree (task, attempt, line_no)
CREATE UNIQUE INDEX transcript_size_pkey ON public.transcript_size USING btree (task, attempt)
CREATE UNIQUE INDEX trigger_rule_pkey ON public.trigger_rule USING btree (id)
CREATE UNIQUE INDEX trigger_rule_workspace_name_key ON public.trigger_rule USING btree (workspace, name)
CREATE UNIQUE INDEX turn_key_pkey ON public.turn_key USING btree (workspace, key)
CREATE INDEX webhook_delivery_due ON public.webhook_delivery USING btree (webhook, next_attempt_at, id) WHERE (status = 'PENDING'::text)
CREATE INDEX webhook_delivery_of ON public.webhook_delivery USING btree (webhook, id)
CREATE INDEX webhook_delivery_old ON public.webhook_delivery USING btree (created_at)
CREATE UNIQUE INDEX webhook_delivery_once ON public.webhook_delivery USING btree (webhook, task, seq, event) WHERE (task IS NOT NULL)
CREATE UNIQUE INDEX webhook_delivery_pkey ON public.webhook_delivery USING btree (id)
CREATE UNIQUE INDEX webhook_pkey ON public.webhook USING btree (id)
CREATE INDEX webhook_workspace ON public.webhook USING btree (workspace, id)
CREATE UNIQUE INDEX worker_pkey ON public.worker USING btree (workspace, id)
CREATE INDEX workspace_name ON public.workspace USING btree (name, created_at)
CREATE INDEX workspace_origin ON public.workspace USING btree (origin) WHERE (origin IS NOT NULL)
CREATE UNIQUE INDEX workspace_pkey ON public.workspace USING btree (id)
policy system on agent to tenuto_system using true check true
policy tenant on agent to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on agent_health to tenuto_system using true check true
policy tenant on agent_health to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on app_user to tenuto_system using true check true
policy system on artifact to tenuto_system using true check true
policy tenant on artifact to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on attempt to tenuto_system using true check true
policy tenant on attempt to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on checkpoint to tenuto_system using true check true
policy tenant on checkpoint to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on child_wait to tenuto_system using true check true
policy tenant on child_wait to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on cursor to tenuto_system using true check true
policy system on definition to tenuto_system using true check true
policy tenant on definition to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on event to tenuto_system using true check true
policy tenant on event to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on flow to tenuto_system using true check true
policy tenant on flow to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on flow_work to tenuto_system using true check true
policy tenant on flow_work to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on gate to tenuto_system using true check true
policy tenant on gate to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on gateway to tenuto_system using true check true
policy system on idempotency to tenuto_system using true check true
policy tenant on idempotency to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on inbox_item to tenuto_system using true check true
policy tenant on inbox_item to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on lane to tenuto_system using true check true
policy tenant on lane to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on leader to tenuto_system using true check true
policy system on member to tenuto_system using true check true
policy tenant on member to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on message to tenuto_system using true check true
policy tenant on message to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on rate_limit to tenuto_system using true check true
policy tenant on rate_limit to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on schedule to tenuto_system using true check true
policy tenant on schedule to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on secret to tenuto_system using true check true
policy tenant on secret to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on session to tenuto_system using true check true
policy system on spending to tenuto_system using true check true
policy tenant on spending to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task to tenuto_system using true check true
policy tenant on task to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_body to tenuto_system using true check true
policy tenant on task_body to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_capability to tenuto_system using true check true
policy tenant on task_capability to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_dependency to tenuto_system using true check true
policy tenant on task_dependency to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_group to tenuto_system using true check true
policy tenant on task_group to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_label to tenuto_system using true check true
policy tenant on task_label to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_output to tenuto_system using true check true
policy tenant on task_output to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_secret to tenuto_system using true check true
policy tenant on task_secret to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_step to tenuto_system using true check true
policy tenant on task_step to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_tag to tenuto_system using true check true
policy tenant on task_tag to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on task_turn to tenuto_system using true check true
policy tenant on task_turn to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on token to tenuto_system using true check true
policy tenant on token to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on transcript to tenuto_system using true check true
policy tenant on transcript to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on transcript_size to tenuto_system using true check true
policy tenant on transcript_size to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on trigger_rule to tenuto_system using true check true
policy tenant on trigger_rule to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on turn_key to tenuto_system using true check true
policy tenant on turn_key to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on webhook to tenuto_system using true check true
policy tenant on webhook to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on webhook_delivery to tenuto_system using true check true
policy tenant on webhook_delivery to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on worker to tenuto_system using true check true
policy tenant on worker to tenuto_runtime using (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check (workspace = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif"))
policy system on workspace to tenuto_system using true check true
policy tenant on workspace to tenuto_runtime using (id = ( SELECT (NULLIF(current_setting('app.workspace'::text, true), ''::text))::uuid AS "nullif")) check
options of task: fillfactor=70, autovacuum_vacuum_scale_factor=0.02, autovacuum_vacuum_cost_delay=0, autovacuum_analyze_scale_factor=0.05
