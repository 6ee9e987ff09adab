-- Tasks: lanes, submission, claims, attempts, events and cursors. `sql.py` explains the notation of
-- all query files.

-- name: lane_touch
-- Inserts the given lanes if needed and marks them as used; a new lane increments the workspace's
-- `lanes_version`.
-- params: now timestamptz, most bigint
-- rows: wanted(id bigint, workspace uuid, key text)
-- as: made
insert into lane (id, workspace, key, used_at)
select wanted.id, wanted.workspace, wanted.key, :now
from {rows:wanted}
where (select count(*) from lane l where l.workspace = wanted.workspace) < :most
on conflict do nothing
returning id, workspace;
update workspace set lanes_version = lanes_version + 1
from {made} where workspace.id = made.workspace;
update lane set used_at = :now
from {rows:wanted} where lane.id = wanted.id and lane.workspace = wanted.workspace
  and lane.used_at < :now - {seconds:3600};

-- name: lanes
-- Returns every lane of a workspace.
-- params: workspace uuid
select lane.id as lane, lane.key, lane.closed_until, lane.closed_why
from lane where lane.workspace = :workspace;

-- name: lanes_version
-- Returns the number that increases whenever the workspace's lanes or their gates change.
-- params: workspace uuid
select workspace.lanes_version, workspace.quota, workspace.complexity from workspace where workspace.id = :workspace;

-- name: lane_close
-- Closes a lane at least until a given time and stores the reason.
-- params: lane bigint, until timestamptz, why text
-- as: moved
update lane set closed_until = :until, closed_why = :why
where id = :lane and (closed_until is null or closed_until < :until) {own:lane}
returning id, workspace;
update workspace set lanes_version = lanes_version + 1
from {moved} where workspace.id = moved.workspace;

-- name: lane_prune
-- Deletes lanes that were not used for long and contain no task that could run.
-- params: before timestamptz, most bigint
-- as: gone
delete from lane where id in (
  select l.id from lane l
  where l.used_at < :before
    and not exists (select 1 from task where task.lane = l.id
      and task.status in ('WAITING', 'PENDING', 'ASSIGNED', 'RUNNING', 'PAUSED', 'RETRY_WAIT'))
  order by l.used_at limit :most)
  -- Checked again: the lane may have been used while this statement waited for its row.
  and used_at < :before
returning id, workspace;
update workspace set lanes_version = lanes_version + 1
from {gone} where workspace.id = gone.workspace;
-- answer: gone(id)

-- fragment: new_body
insert into task_body (task, workspace, created_by, {names:body}[rare: , {names:body.rare}]
  [placed: , {names:body.placed}])
select body.task, body.workspace, body.created_by, {values:body}[rare: , {values:body.rare}]
  [placed: , {values:body.placed}]

-- fragment: new_task
insert into task (id, workspace, {names:hot}, created_at, updated_at[timed: , {names:hot.timed}]
  [placed: , {names:hot.placed}])
select hot.id, hot.workspace, {values:hot}, :now, :now[timed: , {values:hot.timed}]
  [placed: , {values:hot.placed}]

-- fragment: new_label
insert into task_label (task, workspace, label)
select label.task, label.workspace, label.label

-- fragment: new_tag
insert into task_tag (task, workspace, tag)
select tag.task, tag.workspace, tag.tag

-- fragment: new_capability
insert into task_capability (task, workspace, capability)
select capability.task, capability.workspace, capability.capability

-- fragment: record_submitted
{event of hot: seq = 1, kind = 'submitted', new = hot.status, actor = hot.actor}

-- name: submit
-- Inserts tasks that do not exist yet, with their first event; returns the ids that are new.
-- params: now timestamptz
-- rows: body(task uuid, workspace uuid, created_by text, {typed:body})
-- rows: hot(id uuid, workspace uuid, actor text, {typed:hot})
-- rows: label(task uuid, workspace uuid, label text)
-- rows: tag(task uuid, workspace uuid, tag text)
-- rows: capability(task uuid, workspace uuid, capability text)
-- rows: sealed(task uuid, workspace uuid, key_id text, data text)
-- rows: dependency(task uuid, needs uuid, workspace uuid, met boolean, failed boolean)
-- as: inserted
{fragment:new_body}
from {rows:body}
where true
on conflict do nothing
returning task as id;
{fragment:new_task}
from {rows:hot of inserted};
{fragment:record_submitted}
from {rows:hot of inserted};
{fragment:new_label}
from {rows:label of inserted};
{fragment:new_tag}
from {rows:tag of inserted};
{fragment:new_capability}
from {rows:capability of inserted};
insert into task_secret (task, workspace, key_id, data)
select sealed.task, sealed.workspace, sealed.key_id, sealed.data from {rows:sealed of inserted};
insert into task_dependency (task, needs, workspace, met, failed)
select dependency.task, dependency.needs, dependency.workspace, dependency.met, dependency.failed
from {rows:dependency of inserted};
-- answer: inserted(id)

-- name: submit_new
-- Inserts tasks whose ids were never used, with their first event: all of them, or raises
-- `Conflict`.
-- params: now timestamptz
-- rows: body(task uuid, workspace uuid, created_by text, {typed:body})
-- rows: hot(id uuid = body.task, workspace uuid = body.workspace, actor text = body.created_by, {typed:hot})
-- rows: label(task uuid, workspace uuid, label text)
-- rows: tag(task uuid, workspace uuid, tag text)
-- rows: capability(task uuid, workspace uuid, capability text)
-- rows: sealed(task uuid, workspace uuid, key_id text, data text)
-- rows: dependency(task uuid, needs uuid, workspace uuid, met boolean, failed boolean)
{fragment:new_body}
from {rows:body};
{fragment:new_task}
from {rows:hot};
{fragment:new_label}
from {rows:label};
{fragment:new_tag}
from {rows:tag};
{fragment:new_capability}
from {rows:capability};
insert into task_secret (task, workspace, key_id, data)
select sealed.task, sealed.workspace, sealed.key_id, sealed.data from {rows:sealed};
insert into task_dependency (task, needs, workspace, met, failed)
select dependency.task, dependency.needs, dependency.workspace, dependency.met, dependency.failed
from {rows:dependency};
{fragment:record_submitted}
from {rows:hot};

-- name: submitted_before
-- Returns existing tasks that conflict with new ones: same id, or same idempotency key.
-- params: workspace uuid
-- rows: wanted(task uuid, idempotency_key text)
select wanted.task as wanted_id, body.task as id, body.fingerprint
from {rows:wanted}
join task_body body on body.workspace = :workspace
  and (body.task = wanted.task or body.idempotency_key = wanted.idempotency_key);

-- fragment: lanes_unchanged
-- A claim over lanes that changed since the caller read them claims nothing.
(select w.lanes_version from workspace w where w.id = :workspace) = :lanes_version

-- fragment: no_bound
-- Above every rank.
9223372036854775807

-- fragment: claimable only postgres
-- The best tasks over the lanes, by rank, three times as many as requested; then those of them that
-- no other claim has locked. Ranks bound the reading: first a few rows per lane, then only ranks
-- that can still win. The check for PENDING is written so that no partial index fits.
select t.{place} as place from task t
where case when t.status = 'PENDING' then true else false end
  and t.tries < t.max_attempts and t.attempt < 1000
  and {fragment:lanes_unchanged}
  and t.{place} = any (array(
  select c.place
  from (
    select case when count(*) < :n * 3 then {fragment:no_bound} else max(few.rank) end as bound
    from (
      select heads.rank from {each:lanes} cross join lateral (
        select task.rank from task
        where task.lane = lanes.value and task.status = 'PENDING'
        order by task.rank, task.id
        limit (:n * 3) / cardinality(:lanes) + 2
      ) heads order by heads.rank limit :n * 3
    ) few
  ) b cross join {each:lanes} cross join lateral (
    select task.{place} as place, task.id, task.rank from task
    where task.lane = lanes.value and task.status = 'PENDING' and task.rank <= b.bound
    order by task.rank, task.id
    limit :n * 3
  ) c
  order by c.rank, c.id limit :n * 3))
order by t.rank, t.id limit :n
for update skip locked

-- fragment: claimable only sqlite
-- Like the PostgreSQL fragment; `json_each` over a correlated array replaces a lateral join.
select c.value ->> 2 from (
  select case when count(*) < :n then {fragment:no_bound} else max(rank) end as bound from (
    select h.value as rank from {each:lanes}, json_each((
      select json_group_array(rank) from (
        select rank from task where lane = lanes.value and status = 'PENDING' {own:task}
        order by rank, id limit :n / json_array_length(:lanes) + 2))) h
    order by h.value limit :n)
) b, {each:lanes}, json_each((
  select json_group_array(json_array(rank, id, place)) from (
    select rank, id, {place} as place from task
    where lane = lanes.value and status = 'PENDING' and tries < max_attempts and attempt < 1000
      and rank <= b.bound {own:task}
    order by rank, id limit :n))) c
where {fragment:lanes_unchanged}
order by c.value ->> 0, c.value ->> 1 limit :n

-- fragment: claim_head only postgres
select t.{place} as place from task t
where t.lane = :lane and t.status = 'PENDING' and t.tries < t.max_attempts and t.attempt < 1000
  and {fragment:lanes_unchanged}
order by t.rank, t.id limit :n
for update skip locked

-- fragment: claim_head only sqlite
select t.{place} as place from task t
where t.lane = :lane and t.status = 'PENDING' and t.tries < t.max_attempts and t.attempt < 1000
  and {fragment:lanes_unchanged} {own:t}
order by t.rank, t.id limit :n

-- fragment: event_xid
-- Events are read in order of transaction numbers. A transaction may have got its number before it
-- waited for a row that a later number then changed, so a task's events never go back in number.
{greatest}(task.event_xid, {xid})

-- fragment: claim_update
-- What a claim writes into a PENDING row.
set status = :status, version = version + 1, attempt = attempt + 1, tries = tries + 1,
  agent = :agent, worker = :worker, lease_token = :token, session_key = null,
  lease_until = :now + {seconds:{greatest}(coalesce(lease_s, 0), :lease_s)},
  assigned_at = :now, started_at = case when :status = 'RUNNING' then :now end,
  event_xid = {fragment:event_xid}, due_at = :now + {seconds:watch_s}, progress_percent = null, current_step = null,
  progress_at = null, updated_at = :now

-- fragment: picked_tasks only postgres
from {picked} where task.{place} = picked.place

-- fragment: picked_tasks only sqlite
where task.{place} in (select value from json_each({places:picked}))

-- fragment: claim_columns only postgres
returning task.id, task.workspace, task.version, task.attempt, task.tries, task.max_attempts,
  task.lease_until, task.timeout_s, task.checkpoint_seq, task.status, task.rank, task.retry,
  task.event_xid, task.watched, task.awaited

-- fragment: claim_columns only sqlite

-- fragment: claim_rows only postgres
{moved}

-- fragment: claim_rows only sqlite
-- No other process writes meanwhile: exactly the picked tasks are claimed.
json_each({places:picked}) as at cross join task as moved on moved.{place} = at.value

-- fragment: moved only postgres
-- The tasks that the step `moved` changed, in their new state. The statement's snapshot has their
-- old state, so they come from the rows that the update returned.
{moved}

-- fragment: moved only sqlite
-- Like the PostgreSQL fragment; only the place of each row is passed on, and the rest is read
-- there.
json_each({places:moved}) as at cross join task as moved on moved.{place} = at.value

-- fragment: record_claimed
{event of moved: xid = moved.event_xid, kind = 'claimed', previous = 'PENDING', new = moved.status,
  attempt = moved.attempt, agent = :agent, actor = :worker}
from {fragment:claim_rows}

-- fragment: json_object only postgres
json_build_object

-- fragment: json_object only sqlite
json_object

-- fragment: follow_up_snapshot
-- What is known beforehand about the follow-ups of a task's completion, if the task is watched. As
-- text: in a large answer SQLite would not quote what it knows to be JSON.
case when moved.watched then cast({fragment:json_object}('group', body.group_id, 'slot', body.slot,
  'next', body.next, 'awaited', moved.awaited, 'plain', case when body.kind = 'agent'
    and body.parent is null and body.concurrency is null then 1 else 0 end) as text) || ''
  end as standing

-- fragment: body_columns
body.title, body.prompt, body.system_prompt, body.model, body.task_type, body.command, body.cwd,
  body.env, body.input, body.metadata, body.parent, body.trace_id, body.flow, body.key,
  body.follows, body.context, {fragment:follow_up_snapshot}

-- fragment: moved_columns
moved.id, moved.workspace, moved.attempt, moved.tries, moved.max_attempts, moved.lease_until,
  moved.timeout_s, moved.checkpoint_seq, moved.rank, moved.retry, moved.watched

-- fragment: body_of_moved only postgres
-- Looked up by key, row by row, whatever number of rows the planner guesses.
cross join lateral (select b.* from task_body b
  where b.workspace = moved.workspace and b.task = moved.id offset 0) body

-- fragment: body_of_moved only sqlite
cross join task_body body on body.workspace = moved.workspace and body.task = moved.id

-- fragment: previous
-- The output of the task before one in its flow.
case when body.follows is not null
    then (select task_output.output from task_output where task_output.task = body.follows)
    end as previous

-- fragment: claimed_work
select {fragment:moved_columns}, {fragment:body_columns}, {fragment:previous},
  case when moved.checkpoint_seq > 0
    then (select checkpoint.data from checkpoint where checkpoint.task = moved.id) end as checkpoint
from {fragment:claim_rows}
{fragment:body_of_moved}

-- name: claim
-- Claims up to `n` PENDING tasks over several lanes, best rank first; returns them with their
-- input.
-- params: lanes bigint[], workspace uuid, lanes_version bigint, n bigint, status text, agent uuid, worker text, token text, lease_s bigint, now timestamptz
-- as: picked(place), in one
{fragment:claimable};
-- as: moved
update task {fragment:claim_update}
{fragment:picked_tasks}
{fragment:claim_columns};
{fragment:record_claimed};
-- as: work, in one
{fragment:claimed_work};
-- answer: work

-- name: claim_lane
-- Claims up to `n` PENDING tasks of one lane, best rank first; returns them with their input.
-- params: lane bigint, workspace uuid, lanes_version bigint, n bigint, status text, agent uuid, worker text, token text, lease_s bigint, now timestamptz
-- as: picked(place), in one
{fragment:claim_head};
-- as: moved
update task {fragment:claim_update}
{fragment:picked_tasks}
{fragment:claim_columns};
{fragment:record_claimed};
-- as: work, in one
{fragment:claimed_work};
-- answer: work

-- fragment: token_lock only postgres
pg_advisory_xact_lock(hashtextextended(:token, 0))

-- fragment: token_lock only sqlite
:token

-- name: claim_token_lock
-- Serializes claims with the same token; SQLite's writers are serial anyway.
-- params: token text
select {fragment:token_lock} as held;

-- name: claimed_by_token
-- Returns the tasks of a claim whose answer was lost.
-- params: agent uuid, token text
select {fragment:moved_columns}, {fragment:body_columns}, {fragment:previous},
  case when moved.checkpoint_seq > 0
    then (select checkpoint.data from checkpoint where checkpoint.task = moved.id) end as checkpoint
from task moved join task_body body on body.workspace = moved.workspace and body.task = moved.id
where moved.agent = :agent and moved.status in {leased}
  and moved.lease_token = :token {own:moved};

-- name: commit_mark
-- Writes a row unchanged: after this commit every earlier commit is visible or lost.
-- params: workspace uuid
update workspace set lanes_version = lanes_version where workspace.id = :workspace;

-- name: workspace_lock
-- Locks a workspace's row while its running tasks are counted and increased.
-- params: workspace uuid
select workspace.quota from workspace where workspace.id = :workspace {lock};

-- name: workspace_load
-- Returns what counts against a workspace's quota of running tasks.
-- params: workspace uuid
select count(*) as load from task
where task.workspace = :workspace and task.status in {leased};

-- name: workspace_pending
-- Returns what counts against a workspace's quota of tasks that wait to run, up to `most`. Paused
-- tasks count: they all become runnable when they are resumed.
-- params: workspace uuid, most bigint
select count(*) as load from (
  select 1 from lane join task on task.lane = lane.id and task.status = 'PENDING'
  where lane.workspace = :workspace
  union all
  select 1 from task
  where task.workspace = :workspace and task.status in ('WAITING', 'PAUSED')
  limit :most) waiting;

-- name: agent_lock
-- Locks an agent's row while its capacity is counted and used.
-- params: agent uuid
select agent.id, agent.max_concurrent, agent.status from agent where agent.id = :agent {own:agent} {lock};

-- name: agent_load
-- Returns what counts against an agent's capacity: live leases, and unconfirmed kills.
-- params: agent uuid
select (select count(*) from task
    where task.agent = :agent and task.status in {leased} {own:task})
  + (select count(*) from attempt where attempt.agent = :agent and attempt.unconfirmed {own:attempt}) as load;

-- fragment: is_running
-- Written so that no partial index fits: rows are found by key, never by a scan of all running
-- tasks.
case when task.status = 'RUNNING' then true else false end

-- fragment: is_leased
-- Written so that no partial index fits, like `is_running`.
case when task.status in {leased} then true else false end

-- fragment: fence_is_current
-- The attempt with this number and token holds the task.
task.id = :task and task.workspace = :workspace and task.attempt = :attempt
  and task.lease_token = :token and {fragment:is_leased}

-- fragment: complete_columns only postgres
task.id, task.workspace, task.version, task.attempt, task.agent, task.worker, task.session_key,
  task.started_at, task.event_xid, task.awaited

-- fragment: complete_columns only sqlite
task.id, task.{place} as place

-- fragment: complete_update
-- What a completion writes into a row.
update task set status = 'COMPLETED', version = version + 1, lease_until = null, due_at = null,
  hung_warned_at = null, finished_at = :now, updated_at = :now, last_outcome = 'COMPLETED',
  watched = false, event_xid = {fragment:event_xid}

-- fragment: no_request_pending
-- A RUNNING row without a cancel or pause request.
{fragment:is_running} and task.cancel_requested_at is null and task.pause_requested_at is null

-- fragment: owned
-- RUNNING rows whose fences are current.
where task.id = done.id and task.attempt = done.attempt and task.lease_token = done.token
  and task.workspace = :workspace and {fragment:no_request_pending}

-- fragment: complete_owned only postgres
{fragment:complete_update}
from {rows:done} {fragment:owned}

-- fragment: complete_owned only sqlite
-- This step only finds the rows; the next one completes them by place. Finding them again is
-- cheaper than returning them.
select task.id, task.{place} as place
from {rows:done} cross join task {fragment:owned}

-- fragment: owned_columns only postgres
returning {fragment:complete_columns}

-- fragment: owned_columns only sqlite

-- fragment: complete_found only postgres

-- fragment: complete_found only sqlite
{fragment:complete_update}
where task.{place} in (select value from json_each({places:moved}))

-- fragment: attempt_completed
insert into attempt (task, attempt, workspace, outcome, agent, worker, session_key, started_at,
  ended_at)
select moved.id, moved.attempt, moved.workspace, 'COMPLETED', moved.agent, moved.worker,
  moved.session_key, moved.started_at, :now
from {fragment:moved}

-- fragment: record_completed
{event of moved: xid = moved.event_xid, kind = 'completed', previous = 'RUNNING',
  new = 'COMPLETED', attempt = moved.attempt, agent = moved.agent, actor = moved.worker,
  session_key = moved.session_key}
from {fragment:moved}

-- fragment: store_result
insert into task_output (task, workspace, output, summary)
select result.task, result.workspace, result.output, result.summary
from {rows:result of moved}
where true
on conflict (task) do update set output = excluded.output, summary = excluded.summary
  where task_output.workspace = excluded.workspace

-- name: complete_if_owned
-- Completes the attempts whose fence is current and whose task is not watched.
-- params: now timestamptz, workspace uuid
-- rows: done(id uuid, attempt bigint, token text)
-- rows: result(task uuid, workspace uuid, output json, summary text)
-- as: moved(id, place), in one
{fragment:complete_owned} and not task.watched
{fragment:owned_columns};
{fragment:complete_found};
{fragment:attempt_completed};
{fragment:record_completed};
{fragment:store_result};
-- answer: moved(id)

-- name: complete_watched
-- Completes the attempts whose fence is current and whose task is watched; returns their flow
-- positions, so that the caller runs the cascade.
-- params: now timestamptz, workspace uuid
-- rows: done(id uuid, attempt bigint, token text)
-- rows: result(task uuid, workspace uuid, output json, summary text)
-- as: moved(id, place)
{fragment:complete_owned} and task.watched
{fragment:owned_columns};
{fragment:complete_found};
{fragment:attempt_completed};
{fragment:record_completed};
{fragment:store_result};
select {fragment:place_columns}, moved.awaited
from {fragment:moved}
{fragment:body_of_moved};

-- name: heartbeat
-- Renews all leases that the worker still holds; leases missing from the answer are lost.
-- params: now timestamptz, workspace uuid, lease_s bigint
-- rows: lease(id uuid, attempt bigint, token text)
update task set lease_until = :now + {seconds:{greatest}(coalesce(task.lease_s, 0), :lease_s)}
from {rows:lease}
where task.id = lease.id and task.workspace = :workspace and task.attempt = lease.attempt and task.lease_token = lease.token
  and {fragment:is_leased}
returning task.id, task.attempt, task.lease_until, task.cancel_requested_at,
  task.pause_requested_at, task.hung_warned_at, task.started_at;

-- name: progress
-- Stores the progress of attempts whose fence is current. This is not an audit event.
-- params: now timestamptz, workspace uuid
-- rows: report(id uuid, attempt bigint, token text, percent smallint, step text, estimated_completion_at timestamptz)
update task set progress_percent = coalesce(report.percent, task.progress_percent),
  current_step = coalesce(report.step, task.current_step),
  estimated_completion_at = coalesce(report.estimated_completion_at, task.estimated_completion_at),
  progress_at = :now
from {rows:report}
where task.id = report.id and task.workspace = :workspace and task.attempt = report.attempt and task.lease_token = report.token
  and {fragment:is_leased}
returning task.id, task.attempt;

-- name: transcript_reserve
-- Adds to the transcript size of an attempt whose fence is current, unless the transcript is full
-- already; returns the new size.
-- params: workspace uuid, task uuid, attempt bigint, token text, bytes bigint, most bigint
insert into transcript_size (task, attempt, workspace, bytes)
select task.id, task.attempt, task.workspace, :bytes from task
where {fragment:fence_is_current}
on conflict (task, attempt) do update set bytes = transcript_size.bytes + excluded.bytes
  where transcript_size.workspace = excluded.workspace and transcript_size.bytes <= :most
returning bytes;

-- name: transcript_existing
-- Returns which of these lines of an attempt's transcript are stored. The caller has locked the
-- attempt's transcript size.
-- params: task uuid, attempt bigint, lines bigint[]
select transcript.line_no from transcript
where transcript.task = :task and transcript.attempt = :attempt {own:transcript}
  and transcript.line_no in (select value from {each:lines});

-- name: transcript_append
-- Appends lines to the transcript of an attempt. The caller has reserved their size and so has
-- locked it.
-- params: now timestamptz
-- rows: line(task uuid, attempt bigint, line_no bigint, workspace uuid, level text, text text)
insert into transcript (task, attempt, line_no, workspace, level, text, at)
select line.task, line.attempt, line.line_no, line.workspace, line.level, line.text, :now
from {rows:line}
where true
on conflict (task, attempt, line_no) do nothing;

-- name: tasks_locked
-- Returns the rows of tasks, locked in id order.
-- params: ids uuid[]
select {columns:task} from task
where task.id in (select value from {each:ids}) {own:task} order by task.id {lock};

-- name: tasks_update
-- Writes decided changes, each only if the row still has the version that the decision was based
-- on.
-- rows: changed(id uuid, version bigint, lane bigint, status text, hold text, unmet bigint, watched boolean, rank bigint, priority smallint, tries bigint, free_ends bigint, free_mark bigint, losses bigint, agent uuid, worker text, session_key text, lease_until timestamptz, timeout_s bigint, watch_s bigint, cancel_requested_at timestamptz, pause_requested_at timestamptz, hung_warned_at timestamptz, run_at timestamptz, resume_at timestamptz, wait_until timestamptz, next_attempt_at timestamptz, due_at timestamptz, last_error text, error_class text, last_outcome text, updated_at timestamptz, started_at timestamptz, finished_at timestamptz, archived_at timestamptz)
-- rows: ended(task uuid, attempt bigint, workspace uuid, outcome text, agent uuid, worker text, session_key text, started_at timestamptz, ended_at timestamptz, error_class text, message text, stack text, exit_code bigint, receipt json, unconfirmed boolean)
-- rows: noted(task uuid, seq bigint, workspace uuid, event_xid bigint, kind text, level text, message text, previous text, new text, attempt bigint, agent uuid, actor text, session_key text, stack_trace text, data json, at timestamptz)
-- rows: result(task uuid, workspace uuid, output json, summary text)
-- as: moved
update task set version = task.version + 1, lane = changed.lane, status = changed.status,
  hold = changed.hold,
  unmet = changed.unmet, watched = changed.watched, rank = changed.rank, priority = changed.priority, tries = changed.tries,
  free_ends = changed.free_ends, free_mark = changed.free_mark, losses = changed.losses,
  agent = changed.agent, worker = changed.worker, session_key = changed.session_key,
  lease_until = changed.lease_until, timeout_s = changed.timeout_s, watch_s = changed.watch_s,
  cancel_requested_at = changed.cancel_requested_at,
  pause_requested_at = changed.pause_requested_at, hung_warned_at = changed.hung_warned_at,
  run_at = changed.run_at, resume_at = changed.resume_at, wait_until = changed.wait_until,
  next_attempt_at = changed.next_attempt_at, due_at = changed.due_at,
  last_error = changed.last_error, error_class = changed.error_class,
  last_outcome = changed.last_outcome, updated_at = changed.updated_at,
  started_at = changed.started_at, finished_at = changed.finished_at,
  archived_at = changed.archived_at, event_xid = {fragment:event_xid}
from {rows:changed}
where task.id = changed.id and task.version = changed.version {own:task}
returning task.id;
insert into attempt (task, attempt, workspace, outcome, agent, worker, session_key, started_at,
  ended_at, error_class, message, stack, exit_code, receipt, unconfirmed)
select ended.task, ended.attempt, ended.workspace, ended.outcome, ended.agent, ended.worker,
  ended.session_key, ended.started_at, ended.ended_at, ended.error_class, ended.message,
  ended.stack, ended.exit_code, ended.receipt, ended.unconfirmed
from {rows:ended of moved};
{event of noted: task = noted.task, seq = noted.seq, xid = {greatest}(noted.event_xid, {xid}),
  kind = noted.kind, level = noted.level, message = noted.message, previous = noted.previous,
  new = noted.new, attempt = noted.attempt, agent = noted.agent, actor = noted.actor,
  session_key = noted.session_key, stack_trace = noted.stack_trace, data = noted.data,
  at = noted.at}
from {rows:noted of moved};
{fragment:store_result};
-- answer: moved(id)

-- name: quarantine
-- Takes an invalid row out of circulation, with its audit event.
-- params: id uuid, message text, now timestamptz, actor text
-- as: old(id, workspace, status, version, attempt, agent, worker, started_at, event_xid, watched)
select task.id, task.workspace, task.status, task.version, task.attempt, task.agent, task.worker,
  task.started_at, task.event_xid, task.watched
from task
where task.id = :id {own:task}
  and task.status not in {terminal}
{lock};
-- as: moved
update task set status = 'FAILED', error_class = 'corrupt', last_error = :message,
  finished_at = :now, updated_at = :now, due_at = null, lease_until = null, watched = false,
  version = old.version + 1, event_xid = {fragment:event_xid}
from {old}
where task.id = old.id
returning task.id;
insert into attempt (task, attempt, workspace, outcome, agent, worker, started_at, ended_at,
  error_class, message)
select old.id, old.attempt, old.workspace, 'FAILED', old.agent, old.worker, old.started_at, :now,
  'corrupt', :message
from {old} where old.status in {leased};
insert into flow_work (id, workspace, kind, subject, due_at)
select old.id, old.workspace, 'ended', old.id, :now from {old} where old.watched;
{event of old: seq = old.version + 1, xid = {greatest}(old.event_xid, {xid}), kind = 'failed',
  level = 'CRITICAL', message = :message, previous = old.status, new = 'FAILED',
  attempt = old.attempt, data = '{"error_class": "corrupt"}'}
from {old};
-- answer: moved(id)

-- name: checkpoint_save
-- Replaces a task's checkpoint and its number. The caller has locked the task.
-- params: id uuid, workspace uuid, seq bigint, attempt bigint, data json, now timestamptz
insert into checkpoint (task, workspace, seq, attempt, data, at)
select :id, :workspace, :seq, :attempt, :data, :now
where true
on conflict (task) do update
  set seq = excluded.seq, attempt = excluded.attempt, data = excluded.data, at = excluded.at
  where checkpoint.workspace = excluded.workspace;
update task set checkpoint_seq = :seq, progress_at = :now where id = :id and workspace = :workspace;

-- name: checkpoint
-- Returns a task's checkpoint.
-- params: id uuid
select checkpoint.seq, checkpoint.attempt, checkpoint.data, checkpoint.at
from checkpoint where checkpoint.task = :id {own:checkpoint};

-- name: step_record
-- Stores a step's value unless the key has one already.
-- params: id uuid, workspace uuid, key text, attempt bigint, value json, child uuid, now timestamptz
insert into task_step (task, workspace, key, attempt, value, child, at)
select :id, :workspace, :key, :attempt, :value, :child, :now
where true
on conflict (task, key) do nothing
returning key;

-- name: step
-- Returns the stored value of a task's step.
-- params: id uuid, key text
select task_step.value, task_step.child from task_step
where task_step.task = :id and task_step.key = :key {own:task_step};

-- name: steps
-- Returns all stored step values of a task by key.
-- params: id uuid, workspace uuid
select task_step.key, task_step.value, task_step.child, task_step.attempt
from task_step where task_step.task = :id and task_step.workspace = :workspace;

-- name: leases_expired
-- Returns leased tasks of one workspace or of all whose lease has expired, oldest ids first; tasks
-- that another process handles are skipped.
-- params: now timestamptz, workspace uuid, most bigint
select {columns:task} from task
where task.status in {leased} and task.lease_until < :now
  [workspace: and task.workspace = :workspace]
order by task.id limit :most {skip_locked};

-- name: leases_of_worker
-- Returns the tasks that a crashed worker still has leased.
-- params: worker text, most bigint
select {columns:task} from task
where task.status in {leased} and task.worker = :worker
order by task.id limit :most {skip_locked};

-- name: tasks_due
-- Returns tasks of one workspace or of all with a due timer, except tasks with exempt leases; tasks
-- that another process handles are skipped.
-- params: now timestamptz, workspace uuid, most bigint, spared_from timestamptz, spared_to timestamptz
select {columns:task} from task
where task.due_at is not null and task.due_at <= :now
  [workspace: and task.workspace = :workspace] [spared_from: {fragment:not_exempt}]
order by task.due_at limit :most {skip_locked};

-- name: timer_set
-- Corrects a timer for which no change was due.
-- rows: timer(id uuid, due_at timestamptz)
update task set due_at = timer.due_at from {rows:timer} where task.id = timer.id;

-- name: archivable
-- Returns finished tasks that are old enough to be archived.
-- params: before timestamptz, most bigint
select task.id from task
where task.archived_at is null and task.finished_at < :before
  and task.status in {terminal}
order by task.id limit :most;

-- fragment: is_needed
-- An unfinished task or flow may still need the output of task `t`: a task that depends on it, the
-- flow that it is part of, or the task that created it.
(exists (select 1 from task_dependency dependency join task other on other.id = dependency.task
    where dependency.needs = t.id
      and other.status not in {terminal})
  or exists (select 1 from task_body body join flow on flow.id = body.flow
    where body.workspace = t.workspace and body.task = t.id
      and flow.status in ('RUNNING', 'PAUSED'))
  or exists (select 1 from task_body body
    join task other on other.id = body.parent and other.workspace = body.workspace
    where body.workspace = t.workspace and body.task = t.id
      and other.status not in {terminal}))

-- name: output_still_needed
-- Returns the task if an unfinished task or flow may still need its output.
-- params: id uuid, workspace uuid
select t.id from task t where t.id = :id and t.workspace = :workspace and {fragment:is_needed};

-- name: prune_payload
-- Deletes the payload of tasks that finished long ago and that no unfinished task or flow needs;
-- the row and its events stay.
-- params: before timestamptz, most bigint
-- as: old
update task set session_key = null, current_step = '(pruned)'
where id in (select t.id from task t
  where t.archived_at is not null and t.finished_at < :before
    and t.current_step is distinct from '(pruned)' and not {fragment:is_needed}
  order by t.id limit :most)
  -- Checked again: the task may have been retried while this statement waited for its row.
  and archived_at is not null and finished_at < :before
returning id, workspace;
update task_body set {cleared:body}
from {old} where task_body.workspace = old.workspace and task_body.task = old.id;
delete from transcript where task in (select old.id from {old});
delete from transcript_size where task in (select old.id from {old});
delete from task_output where task in (select old.id from {old});
delete from checkpoint where task in (select old.id from {old});
delete from task_step where task in (select old.id from {old});
delete from task_secret where task in (select old.id from {old});
-- answer: old

-- name: payload_delete
-- Deletes the payload and labels of one task and replaces its title; the row and its events stay.
-- params: id uuid, workspace uuid
update task set session_key = null, last_error = null, current_step = '(pruned)'
where id = :id and workspace = :workspace;
update task_body set {cleared:body}, title = '(deleted)', cwd = null, idempotency_key = null,
  fingerprint = null
where workspace = :workspace and task = :id;
delete from transcript where task = :id and workspace = :workspace;
delete from transcript_size where task = :id and workspace = :workspace;
delete from task_output where task = :id and workspace = :workspace;
delete from checkpoint where task = :id and workspace = :workspace;
delete from task_step where task = :id and workspace = :workspace;
delete from task_secret where task = :id and workspace = :workspace;
delete from task_label where task = :id and workspace = :workspace;

-- name: existing_ids
-- Returns those of the given tasks and agents that the workspace has.
-- params: workspace uuid, tasks uuid[], agents uuid[]
select body.task as id from task_body body
where body.workspace = :workspace and body.task in (select value from {each:tasks})
union all
select agent.id from agent
where agent.workspace = :workspace and agent.id in (select value from {each:agents});

-- name: edit
-- Writes edited fields of a task.
-- params: id uuid, workspace uuid, title text, description text, metadata json, set_title boolean, set_description boolean, set_metadata boolean
update task_body set task = task[set_title: , title = :title]
  [set_description: , description = :description][set_metadata: , metadata = :metadata]
where workspace = :workspace and task = :id;

-- name: assign
-- Stores the agent that a task is assigned to.
-- params: id uuid, workspace uuid, agent uuid
update task_body set target_agent = :agent where workspace = :workspace and task = :id;

-- name: relabel
-- Replaces the labels of a task.
-- params: id uuid, workspace uuid, labels text[]
delete from task_label where task = :id and workspace = :workspace
  and label not in (select value from {each:labels});
insert into task_label (task, workspace, label)
select :id, :workspace, value from {each:labels} where true
on conflict do nothing;

-- name: prune_events
-- Deletes old audit rows, oldest first, a bounded number.
-- params: before timestamptz, most bigint
delete from event where (task, seq) in (
  select event.task, event.seq from event
  join task on task.id = event.task
  where event.at < :before and task.archived_at is not null and task.finished_at < :before
  limit :most)
returning task as id;

-- name: attempts_unconfirmed
-- Returns attempts of a worker, or of any worker on its host, whose kill is unconfirmed.
-- params: workspace uuid, agent uuid, worker text, prefix text, most bigint
select attempt.task as id, attempt.attempt, attempt.worker from attempt
where attempt.unconfirmed
  [workspace: and attempt.workspace = :workspace]
  [agent: and attempt.agent = :agent]
  and (attempt.worker = :worker or substr(attempt.worker, 1, length(:prefix)) = :prefix)
limit :most;

-- name: attempts_confirm_gone
-- Records that the processes of such attempts are gone; the event names who checked.
-- params: receipt json, actor text, now timestamptz
-- rows: swept(task uuid, attempt bigint)
-- as: moved
update attempt set unconfirmed = false, receipt = :receipt
from {rows:swept}
where attempt.task = swept.task and attempt.attempt = swept.attempt and attempt.unconfirmed {own:attempt}
returning attempt.task as id;
-- as: noted
update task set version = version + 1, updated_at = :now, event_xid = {fragment:event_xid}
from {moved}
where task.id = moved.id
returning task.id, task.workspace, task.version, task.status, task.attempt, task.event_xid;
{event of noted: xid = noted.event_xid, kind = 'swept',
  message = 'all processes of an unconfirmed attempt are gone', previous = noted.status,
  new = noted.status, attempt = noted.attempt, data = :receipt}
from {noted};
-- answer: moved(id)

-- name: task_show
-- Returns one task with all its fields, without its history.
-- params: workspace uuid, id uuid
select {columns:task}, {request:body}, body.rerun_of, body.created_by, body.flow, body.group_id,
  body.kind,
  (select agent.name from agent where agent.id = task.agent) as agent_name,
  (select task_output.output from task_output where task_output.task = task.id) as output,
  (select task_output.summary from task_output where task_output.task = task.id) as summary,
  (select cast(coalesce(sum(spending.input_tokens), 0) as bigint) from spending
    where spending.task = task.id) as input_tokens,
  (select cast(coalesce(sum(spending.output_tokens), 0) as bigint) from spending
    where spending.task = task.id) as output_tokens,
  (select coalesce(sum(spending.cost_usd), 0.0) from spending
    where spending.task = task.id) as cost_usd,
  (select checkpoint.data from checkpoint where checkpoint.task = task.id) as checkpoint
from task join task_body body on body.workspace = task.workspace and body.task = task.id
where task.id = :id and task.workspace = :workspace;

-- name: labels_of
-- Returns the labels, task tags and capabilities of tasks.
-- params: ids uuid[]
select task_label.task as id, 'label' as kind, task_label.label as value from task_label
where task_label.task in (select value from {each:ids}) {own:task_label}
union all
select task_tag.task as id, 'tag' as kind, task_tag.tag as value from task_tag
where task_tag.task in (select value from {each:ids}) {own:task_tag}
union all
select task_capability.task as id, 'capability' as kind, task_capability.capability as value
from task_capability
where task_capability.task in (select value from {each:ids}) {own:task_capability}
order by 3;

-- fragment: filters
[only_statuses: and task.status in ({literal:statuses})]
[several: and (false]
[or_statuses: or task.status in ({literal:statuses})]
[outcomes: or task.last_outcome in ({literal:outcomes})]
[archived: or task.archived_at is not null]
[several: )]
[attention: and task.status in
  ('WAITING', 'PAUSED', 'RETRY_WAIT', 'FAILED', 'DEAD', 'CANCELLED', 'SKIPPED')]
[min_priority: and task.priority >= :min_priority]
{equal_filters}
[agent: and task.agent = :agent]
[since: and task.created_at >= :since]
[until: and task.created_at < :until]
[contains: and (lower(body.title{ascii}) like :contains escape '!')]
[before: and body.task < :before]
[labels: and (select count(*) from task_label where task_label.task = task.id
  and task_label.label in (select value from {each:labels})) = :label_count]

-- name: task_list
-- Returns tasks newest first, after a cursor.
-- params: workspace uuid, {equal_filter_params}, min_priority bigint, agent uuid, since timestamptz, until timestamptz, contains text, before uuid, labels text[], label_count bigint, most bigint
select {columns:task}, body.title, body.task_type, body.key, body.flow, body.group_id,
  (select agent.name from agent where agent.id = task.agent) as agent_name
from task_body body join task on task.id = body.task
where body.workspace = :workspace
{fragment:filters}
order by body.task desc limit :most;

-- name: task_ids
-- Returns the ids of tasks that match a filter, newest first.
-- params: workspace uuid, {equal_filter_params}, min_priority bigint, agent uuid, since timestamptz, until timestamptz, contains text, before uuid, labels text[], label_count bigint, most bigint
select task.id
from task_body body join task on task.id = body.task
where body.workspace = :workspace
{fragment:filters}
order by body.task desc limit :most;

-- name: task_ids_by_prefix
-- Returns ids that begin with a text, for users who type a part of an id.
-- params: workspace uuid, prefix text
select body.task as id from task_body body
where body.workspace = :workspace and cast(body.task as text) like :prefix limit 3;

-- name: attempts
-- Returns the ended attempts of a task.
-- params: id uuid
select attempt.attempt, attempt.outcome, attempt.agent, attempt.worker, attempt.session_key,
  attempt.started_at, attempt.ended_at, attempt.error_class, attempt.message, attempt.stack,
  attempt.exit_code, attempt.receipt, attempt.unconfirmed,
  (select agent.name from agent where agent.id = attempt.agent) as agent_name
from attempt where attempt.task = :id {own:attempt} order by attempt.attempt;

-- fragment: event_columns
event.seq, event.kind, event.level, event.message, event.previous, event.new,
  event.attempt, event.agent, event.actor, event.session_key, event.stack_trace, event.data,
  event.at

-- name: events
-- Returns a task's audit trail after a version.
-- params: id uuid, after bigint, most bigint
select {fragment:event_columns}
from event where event.task = :id and event.seq > :after {own:event} order by event.seq limit :most;

-- name: transcript
-- Returns a task's transcript after a cursor.
-- params: id uuid, attempt bigint, after bigint, most bigint
select transcript.attempt, transcript.line_no, transcript.level, transcript.text, transcript.at
from transcript
where transcript.task = :id {own:transcript}
  and (transcript.attempt > :attempt
    or (transcript.attempt = :attempt and transcript.line_no > :after))
order by transcript.attempt, transcript.line_no limit :most;

-- name: transcript_tail
-- Returns the newest lines of a task's transcript, newest first.
-- params: id uuid, most bigint
select transcript.attempt, transcript.line_no, transcript.level, transcript.text, transcript.at
from transcript where transcript.task = :id {own:transcript}
order by transcript.attempt desc, transcript.line_no desc limit :most;

-- name: events_tail
-- Returns the newest audit rows of a task, newest first.
-- params: id uuid, most bigint
select {fragment:event_columns}
from event where event.task = :id {own:event} order by event.seq desc limit :most;

-- name: events_notable
-- Returns the newest audit rows with given levels, of any task of a workspace, newest first.
-- params: workspace uuid, most bigint
select {fragment:event_columns}
from event where event.workspace = :workspace and event.level in ({literal:levels})
order by event.at desc limit :most;

-- name: task_counts
-- Returns the number of tasks in each status.
-- params: workspace uuid
select task.status, count(*) as n, min(task.created_at) as oldest_at
from task where task.workspace = :workspace group by task.status;

-- name: queue_ahead
-- Returns how many tasks of a lane are before a rank, up to a limit.
-- params: lane bigint, rank bigint, id uuid, most bigint
select count(*) as n from (
  select 1 from task where task.lane = :lane and task.status = 'PENDING' {own:task}
    and (task.rank < :rank or (task.rank = :rank and task.id < :id)) limit :most) ahead;

-- name: cursor_lock
-- Returns a subscriber's cursor in the events, locked while it moves.
-- params: name text
select cursor.xid, cursor.position from cursor where cursor.name = :name {lock};

-- name: cursor_insert
-- Inserts a subscriber's cursor at the beginning.
-- params: name text, now timestamptz
insert into cursor (name, updated_at) select :name, :now where true on conflict (name) do nothing;

-- name: cursor_move
-- Moves a subscriber's cursor.
-- params: name text, xid bigint, position bigint, now timestamptz
update cursor set xid = :xid, position = :position, updated_at = :now where name = :name;

-- fragment: after_cursor only postgres
-- A position is assigned before its transaction commits, so a reader that trusted positions would
-- skip rows that are still to appear. Only rows older than every running transaction are shown.
where (event.xid, event.position) > (:xid, :position)
  [errors: and event.level in ('ERROR', 'CRITICAL')]
  and event.xid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint
order by event.xid, event.position

-- fragment: after_cursor only sqlite
where event.position > :position and :xid >= 0
  [errors: and event.level in ('ERROR', 'CRITICAL')]
order by event.position

-- name: events_after
-- Returns events after a subscriber's cursor whose transactions are all known to be over, in order.
-- params: xid bigint, position bigint, most bigint
select event.task, event.seq, event.workspace, event.position, event.xid, event.kind,
  event.level, event.message, event.previous, event.new, event.attempt, event.agent, event.actor,
  event.data, event.at,
  (select task.lane from task where task.id = event.task) as lane
from event
{fragment:after_cursor}
limit :most;

-- fragment: newest only postgres
where event.xid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint
order by event.xid desc, event.position desc

-- fragment: newest only sqlite
order by event.position desc

-- name: events_end
-- Returns the newest event whose transaction, and all before it, are known to be over.
select event.xid, event.position from event
{fragment:newest}
limit 1;

-- name: followed_tasks
-- Returns the present state of tasks that clients follow: version, status, progress, and the last
-- transcript line.
-- params: ids uuid[]
select task.id, task.version, task.status, task.attempt, task.progress_percent, task.current_step,
  coalesce((select max(transcript.line_no) from transcript where transcript.task = task.id
    and transcript.attempt = task.attempt), -1) as said
from task where task.id in (select value from {each:ids});

-- fragment: next_xid only postgres
pg_snapshot_xmax(pg_current_snapshot())::text::bigint

-- fragment: next_xid only sqlite
1

-- name: events_with_future_xid
-- Returns an event whose transaction number is still to come: the table was restored from another
-- server.
select event.xid from event where event.xid >= {fragment:next_xid} limit 1;

-- name: renumber_events
-- Resets the transaction numbers of events after a restore, so that positions alone order them. A
-- subscriber goes back to the first event it missed.
update cursor set xid = 0, position = coalesce(
  (select min(e.position) - 1 from event e where (e.xid, e.position) > (cursor.xid, cursor.position)),
  (select max(e.position) from event e), 0);
update task set event_xid = 0 where event_xid > 0;
update event set xid = 0 where xid > 0;

-- name: audit_mismatches
-- Returns tasks whose row and audit trail disagree: the check of I13. Pruned trails are left out.
-- params: most bigint, before timestamptz
select task.id, task.version, task.status, task.attempt from task
left join (
  select event.task, count(*) as n, max(event.seq) as last,
    sum(case when event.kind = 'claimed' then 1 else 0 end) as claims
  from event group by event.task) trail on trail.task = task.id
left join event final on final.task = task.id and final.seq = trail.last
where (task.archived_at is null or task.finished_at >= :before)
  and (trail.n is null or trail.n <> task.version or trail.last <> task.version
    or final.new <> task.status or trail.claims <> task.attempt)
limit :most;

-- name: inconsistent_tasks
-- Returns tasks whose status requires a field or row that is missing.
-- params: most bigint
select task.id, task.status from task
where (task.status in {leased}
    and (task.lease_until is null or task.lease_token is null or task.agent is null))
  or (task.status in {terminal}
    and task.finished_at is null)
  or (task.status = 'RETRY_WAIT' and task.next_attempt_at is null)
  or not exists (select 1 from task_body body
    where body.workspace = task.workspace and body.task = task.id)
limit :most;

-- name: chain_breaks
-- Returns events whose previous status is not the status of the event before: the check of I11.
-- params: most bigint
select later.task as id, later.seq, earlier.new as before_status, later.previous
from event later join event earlier on earlier.task = later.task and earlier.seq = later.seq - 1
where later.previous <> earlier.new
limit :most;
