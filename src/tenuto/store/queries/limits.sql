-- Pauses, and rate limits that all workers share.

-- name: pauses
-- Returns the pauses of a workspace, by kind and name.
-- params: workspace uuid
select gate.kind, gate.subject as name, gate.reason, gate.until, gate.created_by, gate.created_at
from gate where gate.workspace = :workspace order by gate.kind, gate.subject;

-- name: pause_put
-- Inserts a pause or updates its reason and end; returns no row when the workspace has too many
-- pauses.
-- params: workspace uuid, kind text, subject text, reason text, until timestamptz, most bigint, actor text, now timestamptz, id uuid, message text, data json
-- as: made
insert into gate (workspace, kind, subject, reason, until, created_by, created_at)
select :workspace, :kind, :subject, :reason, :until, :actor, :now
where (select count(*) from gate other where other.workspace = :workspace
  and not (other.kind = :kind and other.subject = :subject)) < :most
on conflict (workspace, kind, subject) do update
  set reason = excluded.reason, until = excluded.until, created_by = excluded.created_by,
    created_at = excluded.created_at
returning workspace, kind;
update workspace set lanes_version = lanes_version + 1
from {made} where workspace.id = made.workspace;
{event: seq = 1, workspace = made.workspace, kind = 'gate_closed', level = 'WARN',
  message = :message, data = :data}
from {made};
-- answer: made(kind)

-- name: pause_delete
-- Deletes a pause; returns no row when there was none.
-- params: workspace uuid, kind text, subject text, actor text, now timestamptz, id uuid, message text, data json
-- as: gone
delete from gate
where workspace = :workspace and kind = :kind and subject = :subject
returning workspace, kind;
update workspace set lanes_version = lanes_version + 1
from {gone} where workspace.id = gone.workspace;
{event: seq = 1, workspace = gone.workspace, kind = 'gate_opened', message = :message,
  data = :data}
from {gone};
-- answer: gone(kind)

-- fragment: rate_limit_columns
r.name, r.provider, r.model, r.account, r.requests_per_minute, r.tokens_per_minute, r.taken,
  r.tokens, r.counted_at, r.created_by, r.created_at, r.updated_at

-- name: rate_limits
-- Returns the rate limits of a workspace by name.
-- params: workspace uuid
select {fragment:rate_limit_columns} from rate_limit r
where r.workspace = :workspace order by r.name;

-- name: rate_limits_locked
-- Returns the rate limits that have one of the names, locked while they are counted and used.
-- params: workspace uuid, names text[]
select {fragment:rate_limit_columns} from rate_limit r
where r.workspace = :workspace and r.name in (select value from {each:names})
order by r.name {lock};

-- name: rate_limit_put
-- Inserts or updates a rate limit; returns no row when the workspace has too many others.
-- params: workspace uuid, name text, provider text, model text, account text, requests_per_minute bigint, tokens_per_minute bigint, taken json, tokens double precision, most bigint, actor text, now timestamptz, id uuid, data json
-- as: made
insert into rate_limit (workspace, name, provider, model, account, requests_per_minute,
  tokens_per_minute, taken, tokens, counted_at, created_by, created_at, updated_at)
select :workspace, :name, :provider, :model, :account, :requests_per_minute, :tokens_per_minute,
  :taken, :tokens, :now, :actor, :now, :now
where (select count(*) from rate_limit other
  where other.workspace = :workspace and other.name <> :name) < :most
on conflict (workspace, name) do update
  set provider = excluded.provider, model = excluded.model, account = excluded.account,
    requests_per_minute = excluded.requests_per_minute,
    tokens_per_minute = excluded.tokens_per_minute, taken = excluded.taken,
    tokens = excluded.tokens, counted_at = excluded.counted_at, updated_at = excluded.updated_at
returning workspace, name;
update workspace set lanes_version = lanes_version + 1
from {made} where workspace.id = made.workspace;
{event: seq = 1, workspace = made.workspace, kind = 'limit_set', message = :name, data = :data}
from {made};
-- answer: made(name)

-- name: rate_limit_delete
-- Deletes a rate limit; returns no row when there was none.
-- params: workspace uuid, name text, actor text, now timestamptz, id uuid
-- as: gone
delete from rate_limit where workspace = :workspace and name = :name
returning workspace, name;
update workspace set lanes_version = lanes_version + 1
from {gone} where workspace.id = gone.workspace;
{event: seq = 1, workspace = gone.workspace, kind = 'limit_deleted', message = :name}
from {gone};
-- answer: gone(name)

-- name: rate_limits_update_usage
-- Writes the usage of rate limits that the caller has locked.
-- params: workspace uuid
-- rows: used(name text, taken json, tokens double precision, counted_at timestamptz)
update rate_limit set taken = used.taken, tokens = used.tokens, counted_at = used.counted_at
from {rows:used} where rate_limit.workspace = :workspace and rate_limit.name = used.name;

-- fragment: best_ranks only postgres
select c.rank from {each:lanes} cross join lateral (
  select task.rank, task.id from task
  where task.lane = lanes.value and task.status = 'PENDING'
  order by task.rank, task.id limit :n
) c

-- fragment: best_ranks only sqlite
select c.value as rank from {each:lanes}, json_each((
  select json_group_array(rank) from (
    select rank from task where lane = lanes.value and status = 'PENDING' {own:task}
    order by rank, id limit :n))) c

-- name: lane_heads
-- Returns the ranks of the best PENDING tasks of the given lanes.
-- params: lanes bigint[], n bigint
select heads.rank from ({fragment:best_ranks}) heads order by heads.rank limit :n;
