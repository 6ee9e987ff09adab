-- Push dispatch: agents to push to, sessions at gateways, and the state of gateways.

-- name: push_agents
-- Returns the agents of all workspaces whose sessions these gateways spawn, with their load.
-- params: names text[]
select agent.id, agent.workspace, agent.profile, agent.version, agent.max_concurrent,
  {fragment:running_tasks}
  + (select count(*) from attempt where attempt.agent = agent.id and attempt.unconfirmed) as load
from agent
where agent.profile ->> 'gateway' in (select value from {each:names})
  and agent.status not in ('DRAINING', 'TERMINATED')
order by agent.id;

-- name: push_lanes
-- Returns the lanes of these workspaces that have claimable tasks.
-- params: workspaces uuid[]
select lane.id as lane from lane
where lane.workspace in (select value from {each:workspaces})
  and exists (select 1 from task where task.lane = lane.id and task.status = 'PENDING');

-- name: push_descriptions
-- Returns the descriptions of tasks that gateways receive with the work.
-- params: workspace uuid, ids uuid[]
select body.task as id, body.description from task_body body
where body.workspace = :workspace and body.task in (select value from {each:ids});

-- name: push_status
-- Returns the status of a task and the outcome of its latest attempt.
-- params: id uuid
select task.status, task.attempt, task.last_outcome from task where task.id = :id {own:task};

-- name: session_record
-- Stores the session key of an attempt that is still current, and renews its lease, even if a
-- cancel or pause was requested.
-- params: id uuid, attempt bigint, token text, session_key text, lease_s bigint, now timestamptz
update task set session_key = :session_key,
  lease_until = :now + {seconds:{greatest}(coalesce(task.lease_s, 0), :lease_s)}
where task.id = :id and task.attempt = :attempt and task.lease_token = :token
  and {fragment:is_leased} {own:task}
returning task.id;

-- name: push_sessions_stopping
-- Returns sessions at gateways for which a cancel or pause was requested; a paused session first
-- gets time for a checkpoint.
-- params: workers text[], paused_before timestamptz, most bigint
select task.id, task.attempt, task.worker, task.session_key from task
where (task.cancel_requested_at is not null or task.pause_requested_at is not null)
  and task.worker in (select value from {each:workers})
  and task.status in {leased} and task.session_key is not null
  and (task.cancel_requested_at is not null or task.pause_requested_at <= :paused_before)
limit :most;

-- name: push_sessions_to_kill
-- Returns ended attempts whose sessions may still run at a gateway. An attempt without a known
-- session key is returned only when it is old.
-- params: workers text[], before timestamptz, most bigint
select attempt.task as id, attempt.attempt, attempt.worker, attempt.session_key from attempt
where attempt.unconfirmed and attempt.worker in (select value from {each:workers})
  and (attempt.session_key is not null or attempt.ended_at <= :before)
limit :most;

-- name: gateways
-- Returns the states of gateways.
select gateway.name, gateway.failures, gateway.closed_until, gateway.last_error, gateway.last_ok_at,
  gateway.updated_at
from gateway order by gateway.name;

-- name: gateway_served
-- Records which gateways a coordinator serves.
-- params: names text[], now timestamptz
insert into gateway (name, updated_at)
select value, :now from {each:names} where true
on conflict (name) do update set updated_at = excluded.updated_at;

-- name: gateway_lock
-- Returns one gateway, locked while its failures are counted.
-- params: name text
select gateway.failures, gateway.closed_until from gateway where gateway.name = :name {lock};

-- name: gateway_failed
-- Records a failure, and until when the circuit of the gateway is open.
-- params: name text, failures bigint, closed_until timestamptz, last_error text
update gateway set failures = :failures, closed_until = :closed_until, last_error = :last_error
where name = :name;

-- name: gateway_succeeded
-- Records that the gateway works.
-- params: name text, now timestamptz
update gateway set failures = 0, closed_until = null, last_error = null, last_ok_at = :now
where name = :name;

-- name: gateway_probe
-- Takes the single probe call that a gateway gets when the time of its open circuit is over.
-- params: name text, now timestamptz, until timestamptz
update gateway set closed_until = :until
where name = :name and closed_until is not null and closed_until <= :now
returning name;
