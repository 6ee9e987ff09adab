-- Gates: what people hold back, and the rates that all workers share.

-- name: gates
-- What is held back in a workspace, by kind and name.
-- params: workspace uuid
select gate.kind, gate.subject as name, gate.reason, gate.until, gate.created_by, gate.created_at
from gate where gate.workspace = :workspace order by gate.kind, gate.subject;

-- name: gate_put
-- Hold something back, or say anew why and until when; answers nothing when too much is held.
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
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, data, at)
select :id, 1, made.workspace, {xid}, 'gate_closed', 'WARN', :message, 0, :actor, :data, :now
from {made};
-- answer: made(kind)

-- name: gate_drop
-- Let something go on; answers nothing when it was not held back.
-- params: workspace uuid, kind text, subject text, actor text, now timestamptz, id uuid, message text, data json
-- as: gone
delete from gate
where workspace = :workspace and kind = :kind and subject = :subject
returning workspace, kind;
update workspace set lanes_version = lanes_version + 1
from {gone} where workspace.id = gone.workspace;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, data, at)
select :id, 1, gone.workspace, {xid}, 'gate_opened', 'INFO', :message, 0, :actor, :data, :now
from {gone};
-- answer: gone(kind)

-- fragment: rate_limit_columns
r.name, r.provider, r.model, r.account, r.requests_per_minute, r.tokens_per_minute, r.taken,
  r.tokens, r.counted_at, r.created_by, r.created_at, r.updated_at

-- name: rate_limits
-- The rate limits of a workspace by name.
-- params: workspace uuid
select {fragment:rate_limit_columns} from rate_limit r
where r.workspace = :workspace order by r.name;

-- name: rate_limits_locked
-- Those that have one of the names, held while they are counted and used.
-- params: workspace uuid, names text[]
select {fragment:rate_limit_columns} from rate_limit r
where r.workspace = :workspace and r.name in (select value from {each:names})
order by r.name {lock};

-- name: rate_limit_put
-- Keep a limit under its name; answers nothing when the workspace has too many others.
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
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, data, at)
select :id, 1, made.workspace, {xid}, 'limit_set', 'INFO', :name, 0, :actor, :data, :now
from {made};
-- answer: made(name)

-- name: rate_limit_drop
-- Forget a limit; answers nothing when there was none.
-- params: workspace uuid, name text, actor text, now timestamptz, id uuid
-- as: gone
delete from rate_limit where workspace = :workspace and name = :name
returning workspace, name;
update workspace set lanes_version = lanes_version + 1
from {gone} where workspace.id = gone.workspace;
insert into event (task, seq, workspace, xid, kind, level, message, attempt, actor, at)
select :id, 1, gone.workspace, {xid}, 'limit_deleted', 'INFO', :name, 0, :actor, :now
from {gone};
-- answer: gone(name)

-- name: rate_limits_used
-- Write what was used of limits that the caller holds.
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
-- The ranks of the best PENDING tasks over some lanes.
-- params: lanes bigint[], n bigint
select heads.rank from ({fragment:best_ranks}) heads order by heads.rank limit :n;
