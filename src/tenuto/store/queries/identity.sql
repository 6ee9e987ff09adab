-- name: workspace_make
-- A workspace; `origin` is the one whose ceiling it counts for.
-- params: id uuid, name text, origin uuid, now timestamptz
insert into workspace (id, name, origin, created_at) values (:id, :name, :origin, :now);

-- name: workspace_origin
-- The workspace that a workspace counts for, if any.
-- params: id uuid
select id, origin from workspace where id = :id;

-- name: workspaces_made
-- How many workspaces count for one.
-- params: origin uuid
select count(*) as n from workspace where origin = :origin;

-- name: workspaces
-- All workspaces, or those that somebody belongs to, with the role there.
-- params: user_id uuid, id uuid
select w.id, w.name, w.quota, w.created_at[user_id: , m.role]
from workspace w [user_id: join member m on m.workspace = w.id and m.user_id = :user_id]
where true [id: and w.id = :id]
order by w.created_at, w.id
limit 1000;

-- name: workspace_quota
-- Set what a workspace may use; whoever claims there looks at it anew.
-- params: id uuid, quota json
update workspace set quota = :quota, lanes_version = lanes_version + 1 where id = :id
returning id;

-- name: user_make
-- A user made in the workspace, unless one of that name was made there or is a member; answers it
-- when it is new.
-- params: id uuid, name text, password text, workspace uuid, now timestamptz
insert into app_user (id, name, password, home, created_at)
select :id, :name, :password, :workspace, :now
where not exists (select 1 from member m join app_user u on u.id = m.user_id
  where m.workspace = :workspace and u.name = :name)
on conflict do nothing
returning id;

-- name: user_by_name
-- The user of that name whom a login without a workspace means: a member of the first workspace, else
-- one whom it made, else anybody from before users had a home.
-- params: name text, first uuid
select u.id, u.password, u.disabled_at from app_user u
left join member m on m.user_id = u.id and m.workspace = :first
where u.name = :name and (u.home is null or u.home = :first)
order by case when m.user_id is not null then 0 when u.home = :first then 1 else 2 end,
  u.created_at, u.id
limit 1;

-- name: user_in_workspace
-- The user of that name who belongs to the workspace of that id or, of several workspaces of that
-- name which the first workspace made, to the oldest.
-- params: name text, id uuid, called text, first uuid
select u.id, u.password, u.disabled_at, w.id as workspace
from app_user u join member m on m.user_id = u.id join workspace w on w.id = m.workspace
where u.name = :name [id: and w.id = :id]
  [called: and w.name = :called and (w.origin is null or w.origin = :first)]
order by w.created_at, w.id, u.created_at, u.id limit 1;

-- name: user_by_id
-- A user.
-- params: id uuid
select id, password from app_user where id = :id;

-- name: user_password
-- Give a user another password; all its logins end.
-- params: id uuid, password text, now timestamptz
-- as: changed
update app_user set password = :password where id = :id
returning id;
update session set revoked_at = :now where user_id = :id and revoked_at is null;
-- answer: changed(id)

-- name: members
-- Who belongs to a workspace.
-- params: workspace uuid
select u.id, u.name, m.role, u.created_at, u.disabled_at
from member m join app_user u on u.id = m.user_id
where m.workspace = :workspace
order by u.name
limit 1000;

-- name: member
-- A user who belongs to a workspace.
-- params: workspace uuid, user_id uuid
select u.id, u.name, m.role, u.created_at, u.disabled_at
from member m join app_user u on u.id = m.user_id
where m.workspace = :workspace and m.user_id = :user_id;

-- name: member_put
-- Make a user a member, or change as what.
-- params: workspace uuid, user_id uuid, role text, now timestamptz
insert into member (workspace, user_id, role, created_at)
values (:workspace, :user_id, :role, :now)
on conflict (workspace, user_id) do update set role = excluded.role
returning user_id as id;

-- name: member_drop
-- Take a user out of a workspace. If it made the user, the name is free there again: a user whose
-- home is no workspace, but the user's own id, logs in by naming one of the others.
-- params: workspace uuid, user_id uuid
delete from member where workspace = :workspace and user_id = :user_id;
update app_user set home = id where id = :user_id and home = :workspace;

-- name: user_forget
-- Delete a user who belongs to no workspace any more, with the logins: the name is free again.
-- params: id uuid
delete from session where user_id = :id and not exists (select 1 from member where user_id = :id);
delete from app_user where id = :id and not exists (select 1 from member where user_id = :id);

-- name: owners
-- The users who may enter a workspace as owners.
-- params: workspace uuid
select u.id from member m join app_user u on u.id = m.user_id
where m.workspace = :workspace and m.role = 'OWNER' and u.disabled_at is null;

-- name: owner_tokens
-- The owners' tokens that belong to no user and have no end.
-- params: workspace uuid
select id, scopes from token
where workspace = :workspace and role = 'OWNER' and revoked_at is null and expires_at is null
  and user_id is null and agent is null;

-- name: session_make
-- A login.
-- params: id uuid, user_id uuid, hash text, now timestamptz, expires_at timestamptz
insert into session (id, user_id, hash, created_at, expires_at)
values (:id, :user_id, :hash, :now, :expires_at);

-- name: session_by_hash
-- A login that holds, with its user's workspaces.
-- params: hash text, now timestamptz
select s.id, s.user_id, u.name, m.workspace, m.role
from session s join app_user u on u.id = s.user_id left join member m on m.user_id = u.id
where s.hash = :hash and s.revoked_at is null and s.expires_at > :now and u.disabled_at is null
order by m.created_at, m.workspace;

-- name: session_end
-- Log out.
-- params: id uuid, now timestamptz
update session set revoked_at = :now where id = :id and revoked_at is null
returning id;

-- name: token_make
-- A program's key to a workspace.
-- params: id uuid, workspace uuid, user_id uuid, name text, hash text, role text, scopes json, agent uuid, created_by text, made_by uuid, now timestamptz, expires_at timestamptz
insert into token (id, workspace, user_id, name, hash, role, scopes, agent, created_by, made_by,
  created_at, expires_at)
values (:id, :workspace, :user_id, :name, :hash, :role, :scopes, :agent, :created_by, :made_by,
  :now, :expires_at);

-- fragment: of_user
-- The user of a token and the membership, if it belongs to one who still is a member.
left join member m on m.workspace = token.workspace and m.user_id = token.user_id
left join app_user u on u.id = m.user_id

-- name: token_by_hash
-- A token that was not revoked and has not ended, with what its user is now.
-- params: hash text, now timestamptz
select token.id, token.workspace, token.user_id, token.name, token.role, token.scopes, token.agent,
  token.expires_at, m.role as present, u.disabled_at
from token {fragment:of_user}
where token.hash = :hash and token.revoked_at is null
  and (token.expires_at is null or token.expires_at > :now);

-- name: token_holds
-- A token, if it was not revoked and has not ended.
-- params: workspace uuid, id uuid, now timestamptz
select id from token
where workspace = :workspace and id = :id and revoked_at is null
  and (expires_at is null or expires_at > :now);

-- name: tokens
-- The tokens of a workspace that were not revoked, with how many each has below it.
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
-- A token that was not revoked, and those below it, with what their users are now.
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
-- End tokens.
-- params: workspace uuid, ids uuid[], now timestamptz
update token set revoked_at = :now
where workspace = :workspace and id in (select value from {each:ids}) and revoked_at is null
returning id;

-- name: tokens_any
-- Whether anybody was ever given a token.
select id from token limit 1;

-- name: idempotency_begin
-- Note that a request is being answered; answers nothing when it was noted before.
-- params: workspace uuid, key text, route text, fingerprint text, now timestamptz
insert into idempotency (workspace, key, route, fingerprint, created_at)
values (:workspace, :key, :route, :fingerprint, :now)
on conflict do nothing
returning key;

-- name: idempotency_kept
-- What is known of a request.
-- params: workspace uuid, key text, route text
select fingerprint, status, body, created_at from idempotency
where workspace = :workspace and key = :key and route = :route;

-- name: idempotency_end
-- Keep an answer, or that there was none.
-- params: workspace uuid, key text, route text, status bigint, body text
update idempotency set status = :status, body = :body
where workspace = :workspace and key = :key and route = :route;

-- name: idempotency_forget
-- Forget a request that was refused: it may be made again.
-- params: workspace uuid, key text, route text
delete from idempotency where workspace = :workspace and key = :key and route = :route;

-- name: idempotency_prune
-- Forget requests of long ago.
-- params: before timestamptz
delete from idempotency where created_at < :before returning key;
