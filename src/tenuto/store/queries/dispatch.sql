-- Push dispatch: whom to push to, what became of sessions at gateways, and how the gateways are.

-- name: push_agents
-- The agents of all workspaces whose sessions these gateways spawn, with what counts against them.
-- params: names text[]
select agent.id, agent.workspace, agent.profile, agent.version, agent.max_concurrent,
  (select count(*) from task
    where task.agent = agent.id and task.status in ('ASSIGNED', 'RUNNING'))
  + (select count(*) from attempt where attempt.agent = agent.id and attempt.unconfirmed) as load
from agent
where agent.profile ->> 'gateway' in (select value from {each:names})
  and agent.status not in ('DRAINING', 'TERMINATED')
order by agent.id;

-- name: push_lanes
-- The lanes of these workspaces in which something can be claimed.
-- params: workspaces uuid[]
select lane.id as lane from lane
where lane.workspace in (select value from {each:workspaces})
  and exists (select 1 from task where task.lane = lane.id and task.status = 'PENDING');

-- name: push_words
-- What gateways are told of tasks beside their work.
-- params: workspace uuid, ids uuid[]
select body.task as id, body.description from task_body body
where body.workspace = :workspace and body.task in (select value from {each:ids});

-- name: push_status
-- How a task is, and how its latest attempt ended.
-- params: id uuid
select task.status, task.attempt, task.last_outcome from task where task.id = :id {own:task};

-- name: session_note
-- Note the session of an attempt that is still current, and renew its lease, whatever was asked of it.
-- params: id uuid, attempt bigint, token text, session_key text, lease_s bigint, now timestamptz
update task set session_key = :session_key,
  lease_until = :now + {seconds:{greatest}(coalesce(task.lease_s, 0), :lease_s)}
where task.id = :id and task.attempt = :attempt and task.lease_token = :token
  and {fragment:is_leased} {own:task}
returning task.id;

-- name: push_stopping
-- Sessions at gateways that somebody asked to stop; one to be paused has its time for a checkpoint.
-- params: workers text[], paused_before timestamptz, most bigint
select task.id, task.attempt, task.worker, task.session_key from task
where (task.cancel_requested_at is not null or task.pause_requested_at is not null)
  and task.worker in (select value from {each:workers})
  and task.status in ('ASSIGNED', 'RUNNING') and task.session_key is not null
  and (task.cancel_requested_at is not null or task.pause_requested_at <= :paused_before)
limit :most;

-- name: push_left
-- Ended attempts whose sessions gateways may still run; those whose session nobody knows, when old.
-- params: workers text[], before timestamptz, most bigint
select attempt.task as id, attempt.attempt, attempt.worker, attempt.session_key from attempt
where attempt.unconfirmed and attempt.worker in (select value from {each:workers})
  and (attempt.session_key is not null or attempt.ended_at <= :before)
limit :most;

-- name: gateways
-- How the gateways are.
select gateway.name, gateway.failures, gateway.closed_until, gateway.last_error, gateway.last_ok_at,
  gateway.updated_at
from gateway order by gateway.name;

-- name: gateway_served
-- A coordinator says which gateways it serves.
-- params: names text[], now timestamptz
insert into gateway (name, updated_at)
select value, :now from {each:names} where true
on conflict (name) do update set updated_at = excluded.updated_at;

-- name: gateway_lock
-- One gateway, held while its failures are counted.
-- params: name text
select gateway.failures, gateway.closed_until from gateway where gateway.name = :name {lock};

-- name: gateway_failed
-- Note a failure, and until when the gateway is left alone.
-- params: name text, failures bigint, closed_until timestamptz, last_error text
update gateway set failures = :failures, closed_until = :closed_until, last_error = :last_error
where name = :name;

-- name: gateway_ok
-- The gateway works.
-- params: name text, now timestamptz
update gateway set failures = 0, closed_until = null, last_error = null, last_ok_at = :now
where name = :name;

-- name: gateway_probe
-- Take the one try that a gateway gets when it was left alone long enough.
-- params: name text, now timestamptz, until timestamptz
update gateway set closed_until = :until
where name = :name and closed_until is not null and closed_until <= :now
returning name;
