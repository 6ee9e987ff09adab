-- compat: 2
-- What strangers can be let near: users, tokens, secrets, webhooks, and who sees which row.

alter table workspace add column quota json;

-- People. Not a tenant's: somebody may belong to several workspaces.
create table app_user (
  id uuid primary key,
  name text not null unique,
  password text,
  created_at timestamptz not null,
  disabled_at timestamptz
);

-- Who belongs to a workspace, and as what.
create table member (
  workspace uuid not null,
  user_id uuid not null,
  role text not null check (role in ('OWNER', 'ADMIN', 'MEMBER', 'VIEWER')),
  created_at timestamptz not null,
  primary key (workspace, user_id)
);
create index member_user on member (user_id);

-- A login. `hash` is of the token; the token itself is nowhere.
create table session (
  id uuid primary key,
  user_id uuid not null,
  hash text not null unique,
  created_at timestamptz not null,
  expires_at timestamptz not null,
  revoked_at timestamptz
);

-- A program's key to one workspace.
create table token (
  id uuid primary key,
  workspace uuid not null,
  user_id uuid,
  name text not null,
  hash text not null unique,
  role text not null check (role in ('OWNER', 'ADMIN', 'MEMBER', 'VIEWER')),
  scopes json not null,
  agent uuid,
  created_by text,
  created_at timestamptz not null,
  expires_at timestamptz,
  revoked_at timestamptz
);
create index token_workspace on token (workspace, id);

-- Named secrets of a workspace, encrypted; `data` is bound to the row.
create table secret (
  id uuid primary key,
  workspace uuid not null,
  name text not null,
  key_id text not null,
  data text not null,
  created_by text,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  unique (workspace, name)
);

-- The `secrets` of a task's input, encrypted together.
create table task_secret (
  task uuid primary key,
  workspace uuid not null,
  key_id text not null,
  data text not null
);

-- An endpoint that wants to hear of events. `secret` signs what it gets, and is encrypted: the
-- newest and the one before.
create table webhook (
  id uuid primary key,
  workspace uuid not null,
  url text not null,
  events json not null,
  description text,
  key_id text not null,
  secret text not null,
  enabled boolean not null,
  disabled_why text,
  failures bigint not null default 0,
  closed_until timestamptz,
  version bigint not null default 1,
  created_by text,
  created_at timestamptz not null,
  updated_at timestamptz not null
);
create index webhook_workspace on webhook (workspace, id);

-- One message to one endpoint, tried until it is delivered or given up.
create table webhook_delivery (
  id uuid primary key,
  workspace uuid not null,
  webhook uuid not null,
  task uuid,
  seq bigint,
  event text not null,
  body text not null,
  status text not null check (status in ('PENDING', 'DELIVERED', 'FAILED')),
  attempts bigint not null default 0,
  next_attempt_at timestamptz,
  response_status bigint,
  error text,
  created_at timestamptz not null,
  delivered_at timestamptz
);
create unique index webhook_delivery_once on webhook_delivery (webhook, task, seq, event)
  where task is not null;
create index webhook_delivery_due on webhook_delivery (webhook, next_attempt_at, id)
  where status = 'PENDING';
create index webhook_delivery_of on webhook_delivery (webhook, id);
create index webhook_delivery_old on webhook_delivery (created_at);

-- What waits for a person.
create table inbox_item (
  id uuid primary key,
  workspace uuid not null,
  task uuid,
  kind text not null,
  title text not null,
  body json,
  status text not null check (status in ('OPEN', 'APPROVED', 'REJECTED', 'ANSWERED', 'EXPIRED')),
  decision json,
  decided_by text,
  decided_at timestamptz,
  expires_at timestamptz,
  created_at timestamptz not null
);
create index inbox_item_open on inbox_item (workspace, id) where status = 'OPEN';
create index inbox_item_task on inbox_item (task) where task is not null;

-- Answers to requests that carried an `Idempotency-Key`, kept for a day.
create table idempotency (
  workspace uuid not null,
  key text not null,
  route text not null,
  fingerprint text not null,
  status bigint,
  body text,
  created_at timestamptz not null,
  primary key (workspace, key, route)
);
create index idempotency_old on idempotency (created_at);

-- only postgres
-- Roles belong to the whole server: another database, or an administrator, may have made them.
do $body$
declare
  name text\;
begin
  foreach name in array array['tenuto_runtime', 'tenuto_system'] loop
    if not exists (select from pg_roles where rolname = name) then
      begin
        execute format('create role %I nologin', name)\;
      exception
        when duplicate_object or unique_violation then null\;
      end\;
    end if\;
    if not pg_has_role(current_user, name, 'member') then
      execute format('grant %I to %I', name, current_user)\;
    end if\;
    execute format('grant usage on schema %I to %I', current_schema(), name)\;
  end loop\;
exception when insufficient_privilege then
  raise exception using errcode = 'insufficient_privilege', message = format(
    'the login %s may not make roles, so an administrator has to: create role tenuto_runtime nologin\;'
    ' create role tenuto_system nologin\; grant tenuto_runtime, tenuto_system to %I',
    current_user, current_user)\;
end $body$;
-- Who may see which row. A tenant's connection sees its own workspace and nothing without one; the
-- duties of the system see all. Both are bound, the owner of the tables included.
do $body$
declare
  name text\;
  own text := '(select nullif(current_setting(''app.workspace'', true), '''')::uuid)'\;
begin
  for name in
    select c.relname from pg_class c
    where c.relnamespace = current_schema()::regnamespace and c.relkind = 'r'
      and c.relname <> 'schema_migration'
  loop
    execute format('alter table %I enable row level security', name)\;
    execute format('alter table %I force row level security', name)\;
    execute format('grant select, insert, update, delete on %I to tenuto_system', name)\;
    execute format('create policy system on %I to tenuto_system using (true) with check (true)',
      name)\;
    if name = 'workspace' then
      execute format('grant select, update on %I to tenuto_runtime', name)\;
      execute format('create policy tenant on %I to tenuto_runtime using (id = %s)', name, own)\;
    elsif exists (select from pg_attribute a where a.attrelid = name::regclass
        and a.attname = 'workspace' and not a.attisdropped) then
      execute format('grant select, insert, update, delete on %I to tenuto_runtime', name)\;
      execute format('create policy tenant on %I to tenuto_runtime using (workspace = %s)'
        ' with check (workspace = %s)', name, own, own)\;
    end if\;
  end loop\;
  execute 'grant select on schema_migration to tenuto_runtime, tenuto_system'\;
  execute format('grant usage on all sequences in schema %I to tenuto_runtime, tenuto_system',
    current_schema())\;
end $body$;
-- end only
