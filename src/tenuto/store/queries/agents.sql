-- Agents and workers: registration, heartbeats, status and health.

-- fragment: stale_after only postgres
coalesce(nullif((agent.profile ->> 'stale_threshold_s')::bigint, 0), :stale_s)

-- fragment: stale_after only sqlite
coalesce(nullif(agent.profile ->> 'stale_threshold_s', 0), :stale_s)

-- fragment: busy
exists (select 1 from task where task.agent = agent.id and task.status in {leased})

-- fragment: seen_now
-- What a heartbeat writes into an agent's row: a STALE or ERROR agent becomes IDLE; a DRAINING
-- agent keeps its check time.
set seen_at = :now,
  due_at = case when status = 'DRAINING' then due_at
    else :now + {seconds:{fragment:stale_after}} end,
  version = case when status in ('STALE', 'ERROR') then version + 1 else version end,
  status = case when status in ('STALE', 'ERROR') then 'IDLE' else status end

-- fragment: record_recovered
-- If two processes see an agent at the same moment, one of them records it: both count on from the
-- same version.
{event of silent: seq = silent.version + 1, kind = 'agent_recovered', message = silent.name,
  agent = silent.id, actor = null}
from {silent} where true
on conflict do nothing

-- fragment: running_tasks
-- The number of tasks that an agent runs.
(select count(*) from task where task.agent = agent.id and task.status in {leased})

-- fragment: agent_columns
agent.id, agent.name, agent.profile, agent.status, agent.max_concurrent, agent.version,
  agent.seen_at, agent.due_at, agent.managed, agent.created_at, agent.updated_at,
  {fragment:running_tasks} as running,
  (select count(*) from attempt where attempt.agent = agent.id and attempt.unconfirmed)
    as kills

-- name: worker_heartbeat
-- Stores a heartbeat of a worker and of its agents, or its shutdown; returns what is requested of
-- the worker. When a worker shuts down, its agents stay with the other workers that host them:
-- agents that run nothing do not become stale. The token of an agent covers only the workers that
-- it registered; for any other worker no row is returned.
-- params: id text, workspace uuid, host text, pid bigint, agents json, slots bigint, status text, now timestamptz, names text[], stale_s bigint, registered_by uuid
-- as: silent(id, workspace, name, version)
select agent.id, agent.workspace, agent.name, agent.version from agent
where agent.workspace = :workspace and agent.status in ('STALE', 'ERROR') and :status <> 'STOPPED'
  and agent.name in (select value from {each:names});
-- as: beaten
insert into worker (id, workspace, host, pid, agents, slots, status, started_at, seen_at,
  registered_by)
select :id, :workspace, :host, :pid, :agents, :slots, :status, :now, :now, :registered_by
where true
on conflict (workspace, id) do update
  set seen_at = excluded.seen_at, status = excluded.status, agents = excluded.agents,
  slots = excluded.slots
  where excluded.registered_by is null or worker.registered_by = excluded.registered_by
returning drain_requested_at;
update agent {fragment:seen_now}
where agent.workspace = :workspace and agent.status <> 'TERMINATED' and :status <> 'STOPPED'
  and agent.name in (select value from {each:names});
update agent set due_at = null
where agent.workspace = :workspace and agent.status in ('IDLE', 'WORKING') and :status = 'STOPPED'
  and agent.name in (select value from {each:names}) and not {fragment:busy};
{fragment:record_recovered};
-- answer: beaten(drain_requested_at)

-- name: worker_registered_by
-- Returns the agent whose own token registered a worker, if one did.
-- params: workspace uuid, id text
select worker.registered_by from worker where worker.workspace = :workspace and worker.id = :id;

-- name: tasks_of_agent
-- Returns those of the given tasks that the agent runs or ran.
-- params: workspace uuid, agent uuid, ids uuid[]
select task.id from task
where task.workspace = :workspace and task.id in (select value from {each:ids})
  and (task.agent = :agent or exists (select 1 from attempt
    where attempt.task = task.id and attempt.agent = :agent));

-- name: workers_stale
-- Returns workers without a heartbeat since a given time.
-- params: before timestamptz
update worker set status = 'LOST'
where status in ('RUNNING', 'DRAINING') and seen_at < :before
returning id as worker_id;

-- name: workers_prune
-- Deletes workers that ended long ago.
-- params: before timestamptz
delete from worker where status in ('STOPPED', 'LOST') and seen_at < :before
returning id as worker_id;

-- name: workers
-- Returns the workers of a workspace, newest first.
-- params: workspace uuid
select worker.id as worker_id, worker.host, worker.pid, worker.agents, worker.slots, worker.status,
  worker.started_at, worker.seen_at, worker.drain_requested_at,
  (select count(*) from task where task.status in {leased}
    and task.worker = worker.id and task.workspace = worker.workspace) as running
from worker where worker.workspace = :workspace order by worker.started_at desc limit 1000;

-- name: worker_drain
-- Asks a running worker to finish its tasks and exit; repeating the request changes nothing.
-- params: workspace uuid, id text, now timestamptz
update worker set drain_requested_at = coalesce(drain_requested_at, :now)
where worker.workspace = :workspace and worker.id = :id
  and worker.status in ('RUNNING', 'DRAINING')
returning id as worker_id;

-- name: agent_by_name
-- Returns the agent of a name and locks it until the end of the transaction.
-- params: workspace uuid, name text
select agent.id, agent.profile, agent.managed, agent.version from agent
where agent.workspace = :workspace and agent.name = :name {lock};

-- name: agent_put
-- Inserts an agent or, if it still has version `seen`, updates it. An update increments the
-- version.
-- params: id uuid, workspace uuid, name text, profile json, max_concurrent bigint, managed boolean, seen bigint, now timestamptz
insert into agent (id, workspace, name, profile, status, max_concurrent, managed, created_at,
  updated_at)
select :id, :workspace, :name, :profile, 'IDLE', :max_concurrent, :managed, :now, :now
where true
on conflict (workspace, name) do update
  set profile = excluded.profile, max_concurrent = excluded.max_concurrent,
  managed = agent.managed or excluded.managed, version = agent.version + 1,
  updated_at = excluded.updated_at
  where agent.version = :seen
returning id, version;

-- name: agents
-- Returns the agents of a workspace.
-- params: workspace uuid
select {fragment:agent_columns}
from agent where agent.workspace = :workspace order by agent.name;

-- name: agent
-- Returns one agent.
-- params: workspace uuid, id uuid
select {fragment:agent_columns}
from agent where agent.workspace = :workspace and agent.id = :id;

-- name: agent_page
-- Returns agents by name, after a cursor.
-- params: workspace uuid, after text, most bigint
select {fragment:agent_columns}
from agent where agent.workspace = :workspace [after: and agent.name > :after]
order by agent.name limit :most;

-- name: agents_alive
-- Records heartbeats of agents by name; agents that were stale are no longer stale.
-- params: workspace uuid, names text[], now timestamptz, stale_s bigint
-- as: silent(id, workspace, name, version)
select agent.id, agent.workspace, agent.name, agent.version from agent
where agent.workspace = :workspace and agent.status in ('STALE', 'ERROR')
  and agent.name in (select value from {each:names});
update agent {fragment:seen_now}
where agent.workspace = :workspace and agent.status <> 'TERMINATED'
  and agent.name in (select value from {each:names});
{fragment:record_recovered};

-- name: agent_heartbeat
-- Records a heartbeat of an agent and perhaps its health, which is stored only if no sample was
-- stored within the last `every` seconds. Returns how many messages wait for the agent, up to
-- `most`.
-- params: workspace uuid, id uuid, now timestamptz, stale_s bigint, most bigint, every bigint
-- rows: felt(status text, task uuid, progress_percent double precision, current_step text, memory_mb double precision, cpu_percent double precision)
-- as: silent(id, workspace, name, version)
select agent.id, agent.workspace, agent.name, agent.version from agent
where agent.workspace = :workspace and agent.id = :id and agent.status in ('STALE', 'ERROR');
-- as: moved
update agent {fragment:seen_now}
where agent.workspace = :workspace and agent.id = :id and agent.status <> 'TERMINATED'
returning id, (select count(*) from (select 1 from message
  where message.workspace = :workspace and message.agent = :id and message.taken_at is null
  limit :most) waiting) as messages;
insert into agent_health (agent, at, workspace, status, task, progress_percent, current_step,
  memory_mb, cpu_percent)
select :id, :now, :workspace, felt.status, felt.task, felt.progress_percent, felt.current_step,
  felt.memory_mb, felt.cpu_percent
from {rows:felt}
where not exists (select 1 from agent_health health
  where health.agent = :id and health.workspace = :workspace and health.at > :now - {seconds::every})
on conflict do nothing;
{fragment:record_recovered};
-- answer: moved(id, messages)

-- name: agent_health
-- Returns the latest health samples of an agent, newest first.
-- params: workspace uuid, id uuid, most bigint
select health.at, health.status, health.task, health.progress_percent, health.current_step,
  health.memory_mb, health.cpu_percent
from agent_health health
where health.workspace = :workspace and health.agent = :id
order by health.at desc limit :most;

-- name: agent_health_prune
-- Deletes old health samples, a bounded number.
-- params: before timestamptz, most bigint
delete from agent_health where (agent, at) in (
  select health.agent, health.at from agent_health health
  where health.at < :before order by health.at limit :most)
returning agent as id;

-- name: agent_locked
-- Returns an agent with the number of tasks it runs; locks the agent until the end of the
-- transaction.
-- params: workspace uuid, id uuid
select agent.id, agent.workspace, agent.name, agent.status, agent.version, agent.seen_at,
  {fragment:running_tasks} as running
from agent where agent.workspace = :workspace and agent.id = :id {lock};

-- name: agents_due
-- Returns agents whose check is due, with the number of tasks they run and whether they lost a
-- lease since their last heartbeat.
-- params: now timestamptz, most bigint
select agent.id, agent.workspace, agent.name, agent.status, agent.version, agent.seen_at,
  {fragment:running_tasks} as running,
  case when exists (select 1 from attempt where attempt.agent = agent.id
    and attempt.outcome = 'STALLED' and attempt.ended_at >= agent.seen_at) then 1 else 0 end as lost
from agent where agent.due_at <= :now
order by agent.due_at limit :most {skip_locked};

-- name: agents_set_status
-- Writes agents whose status or next check time changes; a change of status is an event.
-- params: now timestamptz, actor text
-- rows: moved(id uuid, workspace uuid, name text, status text, version bigint, due_at timestamptz, kind text, level text, data json)
update agent set status = moved.status, version = moved.version, due_at = moved.due_at
from {rows:moved} where agent.id = moved.id and agent.workspace = moved.workspace;
{event of moved: kind = moved.kind, level = moved.level, message = moved.name, agent = moved.id,
  data = moved.data}
from {rows:moved} where moved.kind is not null
on conflict do nothing;

-- name: lanes_version_increment
-- Makes every process reload the lanes of a workspace.
-- params: workspace uuid
update workspace set lanes_version = lanes_version + 1 where workspace.id = :workspace;

-- name: agent_profiles
-- Returns the agents that a claim must know about: those described by users, and those that accept
-- no more tasks.
-- params: workspace uuid
select agent.id, agent.status, agent.version, case when agent.managed then agent.profile end as profile
from agent where agent.workspace = :workspace
  and (agent.managed or agent.status in ('DRAINING', 'TERMINATED'));

-- name: agent_delete
-- Deletes an agent that runs nothing, with its messages and health samples.
-- params: workspace uuid, id uuid
-- as: gone
delete from agent where workspace = :workspace and id = :id
  and not {fragment:busy}
returning id;
delete from message where workspace = :workspace and agent in (select gone.id from {gone});
delete from agent_health where workspace = :workspace and agent in (select gone.id from {gone});
-- answer: gone(id)

-- name: lanes_with_pending
-- Returns the lanes of a workspace that have PENDING tasks.
-- params: workspace uuid
select lane.id as lane from lane where lane.workspace = :workspace
  and exists (select 1 from task where task.lane = lane.id and task.status = 'PENDING');

-- name: lane_depths
-- Returns how many tasks wait in each of the given lanes, up to `most`.
-- params: lanes bigint[], most bigint
select lanes.value as lane, (select count(*) from (
  select 1 from task where task.lane = lanes.value and task.status = 'PENDING' {own:task} limit :most) waiting)
  as n
from {each:lanes};
