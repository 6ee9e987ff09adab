-- Values of metrics. Counts stop at a limit, so the cost of a sample does not grow with the data.

-- fragment: past_slowest only postgres
event on (event.xid, event.position) > (slowest.xid, slowest.position)

-- fragment: past_slowest only sqlite
event on event.position > slowest.position

-- name: metrics_sample
-- Returns the gauges of all workspaces: what is counted, its label, and the number, up to `most`.
-- The oldest task is searched among the first `heads` of each lane.
-- params: now timestamptz, most bigint, heads bigint, leader text, apart text
select 'oldest' as what, '' as which, 0 as n, min((select min(head.updated_at) from (
  select task.updated_at from task where task.lane = lane.id and task.status = 'PENDING'
  order by task.rank, task.id limit :heads) head)) as oldest_at
from lane
union all
select 'tasks', 'PENDING', count(*), null
from (select 1 from task where task.status = 'PENDING' limit :most) pending
union all
select 'tasks', kind.status, (select count(*) from (
  select 1 from task where task.status = kind.status
    and task.status in {leased} limit :most) held), null
from (select 'ASSIGNED' as status union all select 'RUNNING') kind
union all
select 'tasks', kind.status, (select count(*) from (
  select 1 from task where task.status = kind.status
    and task.status in ('WAITING', 'PAUSED', 'RETRY_WAIT', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED')
  limit :most) kept), null
from (select 'WAITING' as status union all select 'PAUSED' union all select 'RETRY_WAIT'
  union all select 'FAILED' union all select 'DEAD' union all select 'CANCELLED'
  union all select 'SKIPPED') kind
union all
select 'retries_due', '', count(*), null
from (select 1 from task where task.status = 'RETRY_WAIT' and task.due_at <= :now limit :most) due
union all
select 'workers', worker.status, count(*), null from worker group by worker.status
union all
select 'agents', seen.status, count(*), null from (
  select case when agent.status not in ('IDLE', 'WORKING') then agent.status
    when agent.due_at < :now then 'STALE'
    when {fragment:busy} then 'WORKING'
    else 'IDLE' end as status
  from agent) seen
group by seen.status
union all
select 'leader', '', count(*), null from leader where leader.name = :leader and leader.until > :now
union all
select 'outbox', '', count(*), null from (
  select 1 from (
    select cursor.xid, cursor.position from cursor where cursor.name <> :apart
    order by cursor.xid, cursor.position limit 1) slowest
  join {fragment:past_slowest} limit :most) behind;

-- name: event_history
-- Returns what happened before given events: when the task was submitted or retried by a user, when
-- it last became PENDING, and when the attempt of the event started to run.
-- rows: mark(task uuid, seq bigint, attempt bigint)
select mark.task, mark.seq,
  (select e.at from event e where e.task = mark.task and e.seq <= mark.seq
    and e.kind in ('submitted', 'retried') order by e.seq desc limit 1) as asked_at,
  (select e.at from event e where e.task = mark.task and e.seq < mark.seq
    and e.new = 'PENDING' and (e.previous is null or e.previous <> 'PENDING')
    order by e.seq desc limit 1) as pending_at,
  (select e.at from event e where e.task = mark.task and e.seq < mark.seq
    and e.attempt = mark.attempt and e.new = 'RUNNING' and e.previous <> 'RUNNING'
    order by e.seq desc limit 1) as running_at
from {rows:mark};
