-- name: workspace_insert
-- Inserts a workspace; it counts against the workspace limit of `origin`.
-- params: id uuid, name text, origin uuid, now timestamptz
insert into workspace (id, name, origin, created_at) values (:id, :name, :origin, :now);

-- name: workspace_origin
-- Returns the workspace whose limit a workspace counts against, if any.
-- params: id uuid
select id, origin from workspace where id = :id;

-- name: workspace_count
-- Returns how many workspaces count against the limit of one.
-- params: origin uuid
select count(*) as n from workspace where origin = :origin;

-- name: workspaces
-- Returns all workspaces, or those of one user with the user's role in each.
-- params: user_id uuid, id uuid
select w.id, w.name, w.quota, w.created_at[user_id: , m.role]
from workspace w [user_id: join member m on m.workspace = w.id and m.user_id = :user_id]
where true [id: and w.id = :id]
order by w.created_at, w.id
limit 1000;

-- name: workspace_quota
-- Stores the quota of a workspace; every process that claims there reloads it.
-- params: id uuid, quota json
update workspace set quota = :quota, lanes_version = lanes_version + 1 where id = :id
returning id;

-- name: user_insert
-- Inserts a user created in the workspace, unless a user of that name was created there or is a
-- member; returns the user if it is new.
-- params: id uuid, name text, password text, workspace uuid, now timestamptz
insert into app_user (id, name, password, home, created_at)
select :id, :name, :password, :workspace, :now
where not exists (select 1 from member m join app_user u on u.id = m.user_id
  where m.workspace = :workspace and u.name = :name)
on conflict do nothing
returning id;

-- name: user_by_name
-- Returns the user for a login without a workspace: a member of the first workspace with that name,
-- else a user created by the first workspace, else a user from before users had a home workspace.
-- params: name text, first uuid
select u.id, u.password, u.disabled_at from app_user u
left join member m on m.user_id = u.id and m.workspace = :first
where u.name = :name and (u.home is null or u.home = :first)
order by case when m.user_id is not null then 0 when u.home = :first then 1 else 2 end,
  u.created_at, u.id
limit 1;

-- name: user_in_workspace
-- Returns the user of that name in the workspace with that id. If a workspace name is given that
-- several workspaces created by the first workspace have, the oldest one counts.
-- params: name text, id uuid, called text, first uuid
select u.id, u.password, u.disabled_at, w.id as workspace
from app_user u join member m on m.user_id = u.id join workspace w on w.id = m.workspace
where u.name = :name [id: and w.id = :id]
  [called: and w.name = :called and (w.origin is null or w.origin = :first)]
order by w.created_at, w.id, u.created_at, u.id limit 1;

-- name: user_by_id
-- Returns a user.
-- params: id uuid
select id, password from app_user where id = :id;

-- name: user_password
-- Stores a new password of a user and ends all its logins.
-- params: id uuid, password text, now timestamptz
-- as: changed
update app_user set password = :password where id = :id
returning id;
update session set revoked_at = :now where user_id = :id and revoked_at is null;
-- answer: changed(id)

-- fragment: members_of_workspace
-- Users of a workspace with their roles; a condition or an order can follow.
select u.id, u.name, m.role, u.created_at, u.disabled_at
from member m join app_user u on u.id = m.user_id
where m.workspace = :workspace

-- name: members
-- Returns the members of a workspace.
-- params: workspace uuid
{fragment:members_of_workspace}
order by u.name
limit 1000;

-- name: member
-- Returns a user who is a member of a workspace.
-- params: workspace uuid, user_id uuid
{fragment:members_of_workspace} and m.user_id = :user_id;

-- name: member_put
-- Adds a member or changes its role.
-- params: workspace uuid, user_id uuid, role text, now timestamptz
insert into member (workspace, user_id, role, created_at)
values (:workspace, :user_id, :role, :now)
on conflict (workspace, user_id) do update set role = excluded.role
returning user_id as id;

-- name: member_delete
-- Removes a member from a workspace. If the workspace created the user, the name is free there
-- again: the user's home is then the user's own id instead of a workspace, and a login must name
-- one of the other workspaces.
-- params: workspace uuid, user_id uuid
delete from member where workspace = :workspace and user_id = :user_id;
update app_user set home = id where id = :user_id and home = :workspace;

-- name: user_delete
-- Deletes a user who is not a member of any workspace, with the logins; the name is free again.
-- params: id uuid
delete from session where user_id = :id and not exists (select 1 from member where user_id = :id);
delete from app_user where id = :id and not exists (select 1 from member where user_id = :id);

-- name: owners
-- Returns the users who can enter a workspace as owners.
-- params: workspace uuid
select u.id from member m join app_user u on u.id = m.user_id
where m.workspace = :workspace and m.role = 'OWNER' and u.disabled_at is null;

-- name: owner_tokens
-- Returns owner tokens that belong to no user and never expire.
-- params: workspace uuid
select id, scopes from token
where workspace = :workspace and role = 'OWNER' and revoked_at is null and expires_at is null
  and user_id is null and agent is null;

-- name: session_insert
-- Inserts a login.
-- params: id uuid, user_id uuid, hash text, now timestamptz, expires_at timestamptz
insert into session (id, user_id, hash, created_at, expires_at)
values (:id, :user_id, :hash, :now, :expires_at);

-- name: session_by_hash
-- Returns a valid login with the workspaces of its user.
-- params: hash text, now timestamptz
select s.id, s.user_id, u.name, m.workspace, m.role
from session s join app_user u on u.id = s.user_id left join member m on m.user_id = u.id
where s.hash = :hash and s.revoked_at is null and s.expires_at > :now and u.disabled_at is null
order by m.created_at, m.workspace;

-- name: session_end
-- Ends a login.
-- params: id uuid, now timestamptz
update session set revoked_at = :now where id = :id and revoked_at is null
returning id;

-- name: token_insert
-- Inserts an API token of a workspace.
-- params: id uuid, workspace uuid, user_id uuid, name text, hash text, role text, scopes json, agent uuid, created_by text, made_by uuid, now timestamptz, expires_at timestamptz
insert into token (id, workspace, user_id, name, hash, role, scopes, agent, created_by, made_by,
  created_at, expires_at)
values (:id, :workspace, :user_id, :name, :hash, :role, :scopes, :agent, :created_by, :made_by,
  :now, :expires_at);

-- fragment: of_user
-- The user of a token and the membership, if the token belongs to a user who is still a member.
left join member m on m.workspace = token.workspace and m.user_id = token.user_id
left join app_user u on u.id = m.user_id

-- name: token_by_hash
-- Returns a token that is neither revoked nor expired, with the present rights of its user.
-- params: hash text, now timestamptz
select token.id, token.workspace, token.user_id, token.name, token.role, token.scopes, token.agent,
  token.expires_at, m.role as present, u.disabled_at
from token {fragment:of_user}
where token.hash = :hash and token.revoked_at is null
  and (token.expires_at is null or token.expires_at > :now);

-- name: token_if_valid
-- Returns a token if it is neither revoked nor expired.
-- params: workspace uuid, id uuid, now timestamptz
select id from token
where workspace = :workspace and id = :id and revoked_at is null
  and (expires_at is null or expires_at > :now);

-- name: tokens
-- Returns the tokens of a workspace that are not revoked, each with the number of tokens below it.
-- params: workspace uuid
with recursive listed(id) as (
  select id from token where workspace = :workspace and revoked_at is null
  order by id desc limit 1000
), under(top, id) as (
  select id, id from listed
  union
  select under.top, token.id from under join token on token.made_by = under.id
  where token.workspace = :workspace and token.revoked_at is null
)
select token.id, token.name, token.role, token.scopes, token.agent, token.created_by, token.made_by,
  token.created_at, token.expires_at, token.user_id, m.role as present, u.disabled_at,
  (select count(*) from under where under.top = token.id) - 1 as below
from token join listed on listed.id = token.id {fragment:of_user}
order by token.id desc;

-- name: token_tree
-- Returns a token that is not revoked and the tokens below it, with the present rights of their
-- users.
-- params: workspace uuid, id uuid
with recursive tree(id) as (
  select id from token where workspace = :workspace and id = :id and revoked_at is null
  union
  select token.id from tree join token on token.made_by = tree.id
  where token.workspace = :workspace and token.revoked_at is null
)
select token.id, token.role, token.user_id, m.role as present, u.disabled_at
from token join tree on tree.id = token.id {fragment:of_user};

-- name: tokens_revoke
-- Revokes tokens.
-- params: workspace uuid, ids uuid[], now timestamptz
update token set revoked_at = :now
where workspace = :workspace and id in (select value from {each:ids}) and revoked_at is null
returning id;

-- name: tokens_exist
-- Returns a row if any token was ever issued.
select id from token limit 1;

-- name: idempotency_begin
-- Records that a request is being answered; returns no row when it was recorded before.
-- params: workspace uuid, key text, route text, fingerprint text, now timestamptz
insert into idempotency (workspace, key, route, fingerprint, created_at)
values (:workspace, :key, :route, :fingerprint, :now)
on conflict do nothing
returning key;

-- name: idempotency_by_key
-- Returns the stored response of a request, or that it is still being answered.
-- params: workspace uuid, key text, route text
select fingerprint, status, body, created_at from idempotency
where workspace = :workspace and key = :key and route = :route;

-- name: idempotency_finish
-- Stores the response of a request, or that there was none.
-- params: workspace uuid, key text, route text, status bigint, body text
update idempotency set status = :status, body = :body
where workspace = :workspace and key = :key and route = :route;

-- name: idempotency_delete
-- Deletes the record of a request that was refused, so that it can be repeated.
-- params: workspace uuid, key text, route text
delete from idempotency where workspace = :workspace and key = :key and route = :route;

-- name: idempotency_prune
-- Deletes records of old requests.
-- params: before timestamptz
delete from idempotency where created_at < :before returning key;
