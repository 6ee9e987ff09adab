-- Rights follow people: which token made a token, and which agent's token registered a worker. Names of
-- users are unique in the workspace that made them, names of workspaces need not be.

-- A token ends with the one that made it.
alter table token add column made_by uuid;
create index token_made_by on token (made_by) where made_by is not null;

-- The agent whose own token registered the worker; null: somebody who may speak for every worker.
-- The owner of the tables is bound by their policies, too, and would see no row.
alter table worker add column registered_by uuid;
-- only postgres
alter table worker no force row level security;
alter table agent no force row level security;
alter table token no force row level security;
-- end only
update worker set registered_by = (
  select agent.id from agent join token on token.agent = agent.id
  where agent.workspace = worker.workspace
    and cast(worker.agents as text) = '["' || agent.name || '"]' limit 1);
-- only postgres
alter table worker force row level security;
alter table agent force row level security;
alter table token force row level security;

alter table workspace drop constraint workspace_name_key;
alter table workspace add column origin uuid;
alter table app_user drop constraint app_user_name_key;
alter table app_user add column home uuid;
-- end only

-- only sqlite
alter table workspace rename to workspace_before;
alter table app_user rename to app_user_before;
-- Tenants.
create table workspace (
  id uuid primary key,
  name text not null,
  lanes_version bigint not null default 1,
  created_at timestamptz not null,
  quota json,
  complexity json,
  origin uuid
);
insert into workspace (id, name, lanes_version, created_at, quota, complexity)
select id, name, lanes_version, created_at, quota, complexity from workspace_before;
drop table workspace_before;
-- People. Not a tenant's: somebody may belong to several workspaces.
create table app_user (
  id uuid primary key,
  name text not null,
  password text,
  created_at timestamptz not null,
  disabled_at timestamptz,
  home uuid
);
insert into app_user (id, name, password, created_at, disabled_at)
select id, name, password, created_at, disabled_at from app_user_before;
drop table app_user_before;
-- end only

-- `origin`: the workspace whose people and programs the new one counts for.
create index workspace_origin on workspace (origin) where origin is not null;
create index workspace_name on workspace (name, created_at);
-- `home`: the workspace that made the user; null for one who was made before there were homes.
create unique index app_user_name on app_user (name, home);
create unique index app_user_bare_name on app_user (name) where home is null;
