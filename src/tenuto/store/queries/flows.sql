-- Dependencies, flows and groups, and what follows when a task finishes.

-- fragment: lock_tasks only postgres
for update of task

-- fragment: lock_tasks only sqlite

-- fragment: ready_event
-- The audit row of a WAITING task that became PENDING, up to its `from`.
{event of moved: xid = moved.event_xid, kind = 'ready', previous = 'WAITING', new = 'PENDING',
  attempt = moved.attempt}

-- fragment: record_noted
-- The audit rows that the caller made for changed flows or groups.
{event of noted: seq = noted.seq, kind = noted.kind, level = noted.level, message = noted.message,
  data = noted.data}
from {rows:noted}

-- name: dependency_targets_locked
-- Returns the tasks that new dependencies point to, locked in id order.
-- params: workspace uuid, ids uuid[]
select task.id, task.status, task.rank, body.key from task
join task_body body on body.workspace = task.workspace and body.task = task.id
where task.workspace = :workspace and task.id in (select value from {each:ids})
order by task.id {fragment:lock_tasks};

-- name: mark_watched
-- Marks these tasks as watched, so that their completion is followed up. The caller has locked
-- their rows.
-- params: ids uuid[]
update task set watched = true
where task.id in (select value from {each:ids}) and not task.watched {own:task};

-- name: add_waiters
-- Counts new dependents of tasks; completions that are still to come are followed up. The caller
-- has locked the rows of the tasks.
-- rows: needed(id uuid, n bigint, live boolean)
update task set awaited = task.awaited + needed.n,
  watched = case when needed.live then true else task.watched end
from {rows:needed}
where task.id = needed.id {own:task};

-- fragment: waits_for_tasks_only
-- A task that waits for other tasks and for nothing else.
task.status = 'WAITING' and task.hold is null and task.run_at is null
  and task.queue_ttl_s is null and task.resume_at is null and task.wait_until is null

-- fragment: plain
case when {fragment:waits_for_tasks_only} then true else false end as plain

-- fragment: waiters only postgres
-- From the finished task to its dependents, each found by its key: never by a scan of a workspace's
-- tasks.
select pair.task as id, pair.needs, pair.on_dependency_failure, task.plain
from (
  select d.task, d.needs,
    (select body.on_dependency_failure from task_body body
      where body.workspace = d.workspace and body.task = d.task) as on_dependency_failure
  from task_dependency d
  where d.needs = any (:ids) and not d.met and not d.failed
  order by d.task, d.needs limit :most
) pair
cross join lateral (
  select {fragment:plain} from task where task.id = pair.task offset 0 for update
) task
order by pair.task, pair.needs

-- fragment: waiters only sqlite
select dependency.task as id, dependency.needs, body.on_dependency_failure, {fragment:plain}
from task_dependency dependency
join task on task.id = dependency.task
join task_body body on body.workspace = task.workspace and body.task = task.id
where dependency.needs in (select value from {each:ids})
  and not dependency.met and not dependency.failed {own:dependency}
order by task.id, dependency.needs limit :most

-- name: dependents
-- Returns the tasks that depend on any of these tasks, locked in id order, each with the task it
-- depends on.
-- params: ids uuid[], most bigint
{fragment:waiters};

-- fragment: resolved_pairs only postgres
-- Found by key, pair by pair, whatever number of pairs the planner guesses.
update task_dependency set met = found.met, failed = not found.met
from (
  select pair.met, (select d.{place} from task_dependency d
    where d.task = pair.task and d.needs = pair.needs) as place
  from {rows:pair} offset 0
) found
where task_dependency.{place} = found.place

-- fragment: resolved_pairs only sqlite
update task_dependency set met = pair.met, failed = not pair.met
from {rows:pair}
where task_dependency.task = pair.task and task_dependency.needs = pair.needs {own:task_dependency}

-- name: dependency_resolve
-- Records that a dependency of a task has finished, as met or as failed. The caller has locked the
-- task.
-- rows: pair(task uuid, needs uuid, met boolean)
{fragment:resolved_pairs};

-- fragment: unblocked_columns only postgres
task.id, task.workspace, task.version, task.status, task.lane, task.attempt, task.event_xid

-- fragment: unblocked_columns only sqlite
task.id, task.lane, task.status, task.{place} as place

-- name: unblock
-- Decrements the number of unmet dependencies of WAITING tasks that wait for nothing else; tasks
-- without unmet dependencies become claimable. Resolves the dependency pairs, too. The caller has
-- locked the tasks.
-- params: now timestamptz, actor text
-- rows: pair(task uuid, needs uuid, met boolean)
-- rows: hit(id uuid, n bigint)
{fragment:resolved_pairs};
-- as: moved
update task set unmet = task.unmet - hit.n, updated_at = :now,
  version = task.version + case when task.unmet = hit.n then 1 else 0 end,
  status = case when task.unmet = hit.n then 'PENDING' else task.status end,
  event_xid = {fragment:event_xid}
from {rows:hit}
where task.id = hit.id {own:task}
returning {fragment:unblocked_columns};
{fragment:ready_event}
from {fragment:moved}
where moved.status = 'PENDING';
-- answer: moved(id, status, lane)

-- name: inherit_rank
-- Raises the rank of the dependencies of these tasks, direct and indirect, so that none has a worse
-- position in its lane than the tasks that wait for it.
-- params: most bigint
-- rows: eager(id uuid, rank bigint)
with recursive pulled(id, rank, depth) as (
  select eager.id, eager.rank, 0 from {rows:eager}
  union
  select dependency.needs, pulled.rank, pulled.depth + 1
  from pulled join task_dependency dependency on dependency.task = pulled.id
  where not dependency.met and not dependency.failed and pulled.depth < :most {own:dependency}
)
update task set rank = best.rank
from (select pulled.id, min(pulled.rank) as rank from pulled where pulled.depth > 0
  group by pulled.id) best
where task.id = best.id and task.rank > best.rank
  and task.status in ('WAITING', 'PENDING', 'RETRY_WAIT', 'PAUSED') {own:task};

-- name: dependency_path
-- Returns a row if one of the first tasks depends, directly or indirectly, on one of the second.
-- params: from_ids uuid[], to_ids uuid[], most bigint
with recursive reached(id, depth) as (
  select value, 0 from {each:from_ids}
  union
  select dependency.needs, reached.depth + 1
  from reached join task_dependency dependency on dependency.task = reached.id
  where reached.depth < :most {own:dependency}
)
select reached.id from reached
where reached.id in (select value from {each:to_ids}) limit 1;

-- name: dependency_put
-- Adds dependencies to existing tasks. The caller has locked the tasks.
-- rows: pair(task uuid, needs uuid, workspace uuid)
insert into task_dependency (task, needs, workspace, met)
select pair.task, pair.needs, pair.workspace, false from {rows:pair}
where true
on conflict do nothing
returning task as id;

-- name: dependencies
-- Returns the dependencies of a task and their status.
-- params: task uuid, workspace uuid
select dependency.needs as id, dependency.met, dependency.failed, task.status, body.key, body.title
from task_dependency dependency
join task on task.id = dependency.needs
join task_body body on body.workspace = task.workspace and body.task = task.id
where dependency.task = :task and dependency.workspace = :workspace
order by dependency.needs limit 1000;

-- name: dependency_results
-- Returns the results of the tasks that these tasks depended on, where they are still stored.
-- params: ids uuid[]
select dependency.task, dependency.needs, body.key, task.status, task_output.output
from task_dependency dependency
join task on task.id = dependency.needs
join task_body body on body.workspace = task.workspace and body.task = task.id
left join task_output on task_output.task = dependency.needs
where dependency.task in (select value from {each:ids}) {own:dependency}
  and task.current_step is distinct from '(pruned)';

-- fragment: place_columns
body.task as id, body.workspace, body.flow, body.group_id, body.slot, body.key, body.kind,
  body.next, body.control, body.context, body.follows, body.input, body.prompt, body.parent,
  body.concurrency

-- name: flow_positions
-- Returns the flow positions of tasks.
-- rows: wanted(task uuid, workspace uuid)
select {fragment:place_columns}
from {rows:wanted}
join task_body body on body.workspace = wanted.workspace and body.task = wanted.task;

-- name: outputs
-- Returns the outputs of tasks.
-- params: ids uuid[]
select task_output.task as id, task_output.output from task_output
where task_output.task in (select value from {each:ids}) {own:task_output};

-- name: flow_results
-- Returns the latest result of each key in a flow, where it is still stored.
-- params: flow uuid, keys text[]
select body.key, body.task as id, task_output.output
from task_body body join task on task.id = body.task
left join task_output on task_output.task = body.task
where body.flow = :flow and body.key in (select value from {each:keys})
  and task.status = 'COMPLETED' and task.current_step is distinct from '(pruned)' {own:body}
order by body.key, body.activation;

-- name: flow_plans
-- Returns flows with their plans and inputs, which never change.
-- params: ids uuid[]
select {fragment:flow_columns}, flow.plan, flow.input from flow
where flow.id in (select value from {each:ids}) {own:flow};

-- name: flow_insert
-- Inserts a new flow with its first event; inserts nothing when its schedule or trigger fired
-- before.
-- params: id uuid, workspace uuid, key text, title text, plan json, input json, steps bigint, priority smallint, source text, fire_key text, rerun_of uuid, trace_id text, actor text, now timestamptz
-- as: made
insert into flow (id, workspace, key, title, status, plan, input, steps_left, open, priority, source,
  fire_key, rerun_of, trace_id, created_by, created_at, updated_at)
select :id, :workspace, :key, :title, 'RUNNING', :plan, :input, :steps, 1, :priority, :source,
  :fire_key, :rerun_of, :trace_id, :actor, :now, :now
where true
on conflict do nothing
returning id;
{event of made: seq = 1, workspace = :workspace, kind = 'flow_started', message = :key,
  data = '{"status": "RUNNING"}'}
from {made};
-- answer: made(id)

-- fragment: flow_columns
flow.id, flow.workspace, flow.key, flow.title, flow.status, flow.steps_left, flow.open, flow.failed,
  flow.priority, flow.source, flow.rerun_of, flow.trace_id, flow.created_by, flow.version,
  flow.created_at, flow.updated_at, flow.finished_at

-- name: flows_locked
-- Returns flows, locked in id order.
-- params: ids uuid[]
select {fragment:flow_columns} from flow
where flow.id in (select value from {each:ids}) {own:flow} order by flow.id {lock};

-- name: flow_update
-- Writes changed flows, with an event for each new status. The caller has locked them.
-- params: now timestamptz, actor text
-- rows: changed(id uuid, workspace uuid, version bigint, status text, steps_left bigint, open bigint, failed bigint, finished_at timestamptz)
-- rows: noted(id uuid, workspace uuid, seq bigint, kind text, level text, message text, data json)
-- as: moved
update flow set version = changed.version, status = changed.status,
  steps_left = changed.steps_left, open = changed.open, failed = changed.failed,
  finished_at = changed.finished_at, updated_at = :now
from {rows:changed} where flow.id = changed.id and flow.workspace = changed.workspace
returning flow.id;
{fragment:record_noted};
-- answer: moved(id)

-- name: activations
-- Returns how often each key was activated in a flow, as task or group; each key is looked up
-- separately.
-- params: flow uuid, keys text[]
select wanted.key, {greatest}(coalesce(wanted.tasks, 0), coalesce(wanted.groups, 0)) as activation
from (
  select keys.value as key,
    (select max(body.activation) from task_body body
      where body.flow = :flow and body.key = keys.value {own:body}) as tasks,
    (select max(task_group.activation) from task_group
      where task_group.flow = :flow and task_group.key = keys.value {own:task_group}) as groups
  from {each:keys}
) wanted
where wanted.tasks is not null or wanted.groups is not null;

-- fragment: group_columns
task_group.id, task_group.workspace, task_group.flow, task_group.key, task_group.title,
  task_group.activation, task_group.parent, task_group.slot, task_group.kind, task_group.status,
  task_group.join_policy, task_group.depth, task_group.total, task_group.made, task_group.open,
  task_group.succeeded, task_group.failed, task_group.turn, task_group.follows,
  task_group.context, task_group.version, task_group.created_at, task_group.updated_at,
  task_group.finished_at

-- name: group_insert
-- Inserts new group runs with their first events.
-- params: now timestamptz, actor text
-- rows: born(id uuid, workspace uuid, flow uuid, key text, title text, activation bigint, parent uuid, slot bigint, kind text, status text, join_policy text, depth bigint, items json, total bigint, follows uuid, context json, data json)
insert into task_group (id, workspace, flow, key, title, activation, parent, slot, kind, status,
  join_policy, depth, items, total, open, follows, context, created_at, updated_at)
select born.id, born.workspace, born.flow, born.key, born.title, born.activation, born.parent,
  born.slot, born.kind, born.status, born.join_policy, born.depth, born.items, born.total,
  born.total, born.follows, born.context, :now, :now
from {rows:born};
{event of born: seq = 1, kind = 'group_made', message = born.key, data = born.data}
from {rows:born};

-- name: groups_locked
-- Returns group runs, locked in id order.
-- params: ids uuid[]
select {fragment:group_columns} from task_group
where task_group.id in (select value from {each:ids}) {own:task_group} order by task_group.id {lock};

-- name: group_items
-- Returns the items of a foreach group run.
-- params: id uuid
select task_group.items from task_group where task_group.id = :id {own:task_group};

-- name: group_update
-- Writes changed groups, with an event for each new status. The caller has locked them.
-- params: now timestamptz, actor text
-- rows: changed(id uuid, workspace uuid, version bigint, status text, made bigint, open bigint, succeeded bigint, failed bigint, turn bigint, follows uuid, finished_at timestamptz)
-- rows: noted(id uuid, workspace uuid, seq bigint, kind text, level text, message text, data json)
-- as: moved
update task_group set version = changed.version, status = changed.status, made = changed.made,
  open = changed.open, succeeded = changed.succeeded, failed = changed.failed,
  turn = changed.turn, follows = changed.follows, finished_at = changed.finished_at,
  updated_at = :now
from {rows:changed} where task_group.id = changed.id and task_group.workspace = changed.workspace
returning task_group.id;
{fragment:record_noted};
-- answer: moved(id)

-- fragment: open_children only postgres
-- Looked up child by child, in order of slots, however many of them the planner assumes to be
-- finished.
cross join lateral (select 1 from task where task.id = body.task
  and task.status not in {terminal} offset 0) still

-- fragment: open_children only sqlite
join task on task.id = body.task
  and task.status not in {terminal}

-- fragment: next_child
-- The first unfinished child of a group after a slot: a task or a group.
select found.id, found.slot, found.is_group from (
  select * from (
    select body.task as id, body.slot, 0 as is_group
    from task_body body {fragment:open_children}
    where body.group_id = :parent and body.workspace = :workspace and body.slot > :slot
    order by body.slot limit 1
  ) as a_task
  union all
  select * from (
    select task_group.id, task_group.slot, 1 as is_group from task_group
    where task_group.parent = :parent and task_group.slot > :slot {own:task_group}
      and task_group.status in {group_open}
    order by task_group.slot limit 1
  ) as a_group
) found order by found.slot limit 1

-- name: next_in_turn
-- Returns the first unfinished child of a group after a slot: a task or a group.
-- params: parent uuid, workspace uuid, slot bigint
{fragment:next_child};

-- fragment: waits_for_turn
-- A child that waits for nothing but its turn.
task.status = 'WAITING' and task.hold = 'turn' and task.unmet = 0 and task.attempt = 0
  and task.run_at is null and task.queue_ttl_s is null and task.resume_at is null
  and task.wait_until is null

-- name: give_turn_to_next
-- Gives the turn of a group to its next child and writes the group, if that child is a task that
-- waits only for its turn; otherwise changes nothing. The caller has locked the group.
-- params: parent uuid, workspace uuid, slot bigint, open bigint, succeeded bigint, failed bigint, follows uuid, now timestamptz, actor text
-- as: picked(place)
select task.{place} as place from task
where task.id = (select child.id from ({fragment:next_child}) child where child.is_group = 0)
  and {fragment:waits_for_turn} {own:task};
-- as: moved
update task set status = 'PENDING', hold = null, version = task.version + 1, updated_at = :now,
  event_xid = {fragment:event_xid}
{fragment:picked_tasks}
returning {fragment:unblocked_columns};
{fragment:ready_event}
from {fragment:moved};
update task_body set follows = :follows
where task_body.workspace = :workspace and task_body.task in (select moved.id from {moved});
update task_group set open = :open, succeeded = :succeeded, failed = :failed, follows = :follows,
  turn = (select body.slot from task_body body
    where body.workspace = :workspace and body.task = moved.id), updated_at = :now
from {moved} where task_group.id = :parent and task_group.workspace = :workspace;
-- answer: moved(id, lane)

-- name: set_predecessor
-- Stores the task whose result a child receives as its input.
-- params: id uuid, workspace uuid, follows uuid
update task_body set follows = :follows where workspace = :workspace and task = :id;

-- name: children_open
-- Returns the unfinished children of a group: tasks and groups.
-- params: parent uuid, workspace uuid, most bigint
select found.id, found.is_group from (
  select body.task as id, body.slot, 0 as is_group
  from task_body body join task on task.id = body.task
  where body.group_id = :parent and body.workspace = :workspace
    and task.status not in {terminal}
    and task.cancel_requested_at is null
  union all
  select task_group.id, task_group.slot, 1 from task_group
  where task_group.parent = :parent {own:task_group} and task_group.status in {group_open}
) found order by found.slot limit :most;

-- name: roots_open
-- Returns the unfinished tasks and groups at the top level of a flow.
-- params: flow uuid, most bigint
select found.id, found.is_group from (
  select body.task as id, 0 as is_group
  from task_body body join task on task.id = body.task
  where body.flow = :flow and body.group_id is null {own:body}
    and task.status not in {terminal}
    and task.cancel_requested_at is null
  union all
  select task_group.id, 1 from task_group
  where task_group.flow = :flow and task_group.parent is null {own:task_group}
    and task_group.status in {group_open}
) found limit :most;

-- name: deferred_add
-- Inserts deferred work.
-- rows: work(id uuid, workspace uuid, kind text, subject uuid, data json, due_at timestamptz)
insert into flow_work (id, workspace, kind, subject, data, due_at)
select work.id, work.workspace, work.kind, work.subject, work.data, work.due_at from {rows:work};

-- name: deferred_due
-- Returns due deferred work of one workspace or of all, oldest first; work that another process has
-- locked is skipped.
-- params: now timestamptz, workspace uuid, most bigint
select flow_work.id, flow_work.workspace, flow_work.kind, flow_work.subject, flow_work.data
from flow_work where flow_work.due_at <= :now [workspace: and flow_work.workspace = :workspace]
order by flow_work.due_at, flow_work.id limit :most {skip_locked};

-- name: deferred_lock
-- Returns one row of deferred work, locked; no row when another process has locked it or has done
-- it.
-- params: id uuid
select flow_work.id, flow_work.workspace, flow_work.kind, flow_work.subject, flow_work.data
from flow_work where flow_work.id = :id {own:flow_work} {skip_locked};

-- name: deferred_delete
-- Deletes deferred work that is done.
-- params: ids uuid[]
delete from flow_work where flow_work.id in (select value from {each:ids}) {own:flow_work};

-- name: deferred_outcomes_delete
-- Deletes deferred follow-ups of completions whose tasks are retried; returns the tasks.
-- params: ids uuid[]
delete from flow_work where flow_work.kind = 'ended'
  and flow_work.subject in (select value from {each:ids}) {own:flow_work}
returning subject as id;

-- name: deferred_exists
-- Returns a row if deferred work of a kind exists in a workspace.
-- params: workspace uuid, kind text
select flow_work.id from flow_work
where flow_work.workspace = :workspace and flow_work.kind = :kind limit 1;

-- name: deferred_postpone
-- Postpones deferred work that cannot be done now.
-- params: id uuid, at timestamptz
update flow_work set due_at = :at where flow_work.id = :id {own:flow_work};

-- name: inbox_put
-- Inserts an item into the inbox.
-- params: id uuid, workspace uuid, task uuid, kind text, title text, body json, expires_at timestamptz, now timestamptz
insert into inbox_item (id, workspace, task, kind, title, body, status, expires_at, created_at)
select :id, :workspace, :task, :kind, :title, :body, 'OPEN', :expires_at, :now;

-- name: inbox_close
-- Closes open inbox items and messages of a task, to people or to the agent of its parent, that
-- need no answer any more.
-- params: task uuid, kept text, now timestamptz, actor text
update inbox_item set status = 'EXPIRED', decided_at = :now, decided_by = :actor
where inbox_item.task = :task and inbox_item.status = 'OPEN' {own:inbox_item}
  and (:kept is null or inbox_item.kind <> :kept);
update message set taken_at = :now, replaced = true
where message.task = :task and message.taken_at is null {own:message};

-- fragment: inbox_columns
inbox_item.id, inbox_item.task, inbox_item.kind, inbox_item.title, inbox_item.body,
  inbox_item.status, inbox_item.decision, inbox_item.decided_by, inbox_item.decided_at,
  inbox_item.expires_at, inbox_item.created_at, inbox_item.key

-- name: inbox_page
-- Returns inbox items, newest first.
-- params: workspace uuid, status text, before uuid, most bigint
select {fragment:inbox_columns}
from inbox_item
where inbox_item.workspace = :workspace
  [status: and inbox_item.status = :status]
  [before: and inbox_item.id < :before]
order by inbox_item.id desc limit :most;

-- name: inbox_item
-- Returns one inbox item.
-- params: id uuid, workspace uuid
select {fragment:inbox_columns}
from inbox_item where inbox_item.id = :id and inbox_item.workspace = :workspace;

-- name: inbox_locked
-- Returns one inbox item, locked.
-- params: id uuid, workspace uuid
select inbox_item.id, inbox_item.task, inbox_item.kind, inbox_item.status, inbox_item.key
from inbox_item
where inbox_item.id = :id and inbox_item.workspace = :workspace {lock};

-- name: inbox_answer
-- Stores a person's answer. The caller has locked the item.
-- params: id uuid, status text, decision json, actor text, now timestamptz
update inbox_item set status = :status, decision = :decision, decided_by = :actor,
  decided_at = :now
where inbox_item.id = :id {own:inbox_item};

-- name: definition_specs
-- Returns definitions by key, or all of a workspace.
-- params: workspace uuid, keys text[], most bigint
select definition.key, definition.kind, definition.spec from definition
where definition.workspace = :workspace [keys: and definition.key in (select value from {each:keys})]
order by definition.key limit :most;

-- name: flow_show
-- Returns one flow.
-- params: id uuid, workspace uuid
select {fragment:flow_columns} from flow where flow.id = :id and flow.workspace = :workspace;

-- name: flow_page
-- Returns flows, newest first.
-- params: workspace uuid, status text, key text, before uuid, most bigint
select {fragment:flow_columns} from flow
where flow.workspace = :workspace
  [status: and flow.status = :status]
  [key: and flow.key = :key]
  [before: and flow.id < :before]
order by flow.id desc limit :most;

-- name: flow_live
-- Returns the unfinished flows of a key, oldest first.
-- params: workspace uuid, key text, source text
select flow.id from flow
where flow.workspace = :workspace and flow.key = :key and flow.status in ('RUNNING', 'PAUSED')
  [source: and flow.source = :source]
order by flow.id limit 1000;

-- name: flow_counts
-- Returns the number of tasks of a flow by status.
-- params: flow uuid, workspace uuid
select task.status, count(*) as n
from task_body body join task on task.id = body.task
where body.flow = :flow and body.workspace = :workspace group by task.status;

-- name: flow_nodes
-- Returns the tasks and groups that were activated in a flow, in order.
-- params: flow uuid, workspace uuid, most bigint
select found.id, found.key, found.title, found.kind, found.status, found.activation, found.parent,
  found.slot, found.progress_percent, found.open, found.total, found.failed from (
  select body.task as id, body.key, body.title, body.kind, task.status, body.activation,
    body.group_id as parent, body.slot, task.progress_percent, null as open, null as total,
    null as failed
  from task_body body join task on task.id = body.task
  where body.flow = :flow and body.workspace = :workspace
  union all
  select task_group.id, task_group.key, task_group.title, task_group.kind, task_group.status,
    task_group.activation, task_group.parent, task_group.slot, null, task_group.open,
    task_group.total, task_group.failed
  from task_group where task_group.flow = :flow and task_group.workspace = :workspace
) found order by found.id limit :most;

-- fragment: subtree
-- A group and the groups in it, direct and nested.
with recursive inside(id) as (
  select task_group.id from task_group
  where task_group.id = :group_id and task_group.workspace = :workspace
  union
  select task_group.id from task_group join inside on task_group.parent = inside.id
    and task_group.workspace = :workspace
)

-- name: flow_tasks_open
-- Returns the unfinished tasks of a flow, in id order.
-- params: flow uuid, workspace uuid, after uuid, most bigint
select body.task as id from task_body body join task on task.id = body.task
where body.flow = :flow and body.workspace = :workspace
  and task.status not in {terminal}
  [after: and body.task > :after]
order by body.task limit :most;

-- name: group_tasks_open
-- Returns the unfinished tasks of a group, direct and nested, in id order.
-- params: group_id uuid, workspace uuid, after uuid, most bigint
{fragment:subtree}
select body.task as id from task_body body join task on task.id = body.task
where body.group_id in (select inside.id from inside) and body.workspace = :workspace
  and task.status not in {terminal}
  [after: and body.task > :after]
order by body.task limit :most;

-- name: children_waiting_for_turn
-- Returns the direct tasks of a group that wait for their turn, in id order.
-- params: group_id uuid, workspace uuid, after uuid, most bigint
select body.task as id from task_body body join task on task.id = body.task
where body.group_id = :group_id and body.workspace = :workspace
  and task.status in ('WAITING', 'PAUSED') and task.hold = 'turn'
  [after: and body.task > :after]
order by body.task limit :most;

-- name: group_show
-- Returns one group run.
-- params: id uuid, workspace uuid
select {fragment:group_columns} from task_group
where task_group.id = :id and task_group.workspace = :workspace;

-- name: group_page
-- Returns group runs, newest first.
-- params: workspace uuid, status text, key text, flow uuid, before uuid, most bigint
select {fragment:group_columns} from task_group
where task_group.workspace = :workspace
  [status: and task_group.status = :status]
  [key: and task_group.key = :key]
  [flow: and task_group.flow = :flow]
  [before: and task_group.id < :before]
order by task_group.id desc limit :most;

-- name: group_progress
-- Returns the progress and cost of a group's tasks, direct and nested.
-- params: group_id uuid, workspace uuid
{fragment:subtree}
select count(*) as tasks,
  sum(case when task.status in {terminal} then 1
    else 0 end) as ended,
  sum(case when task.status in {terminal} then 100
    else coalesce(task.progress_percent, 0) end) as percents,
  (select sum(spending.cost_usd) from spending join task_body spent on spent.task = spending.task
    where spent.group_id in (select inside.id from inside)
      and spent.workspace = :workspace) as cost_usd
from task_body body join task on task.id = body.task
where body.group_id in (select inside.id from inside) and body.workspace = :workspace;

-- name: task_statuses
-- Returns the statuses of tasks.
-- params: ids uuid[]
select task.id, task.workspace, task.status from task
where task.id in (select value from {each:ids}) {own:task};

-- name: failed_dependents
-- Returns the tasks that failed or were skipped because one of these tasks did not complete, locked
-- in id order.
-- params: ids uuid[], most bigint
select dependency.task as id, dependency.needs, task.status, task.error_class
from task_dependency dependency join task on task.id = dependency.task
where dependency.needs in (select value from {each:ids}) and dependency.failed {own:dependency}
  and task.status in ('FAILED', 'SKIPPED')
order by task.id, dependency.needs limit :most {fragment:lock_tasks};

-- name: dependencies_unmet
-- Returns the unmet and failed dependencies of these tasks, with their present status.
-- params: ids uuid[]
select dependency.task as id, dependency.needs, dependency.failed, task.status
from task_dependency dependency join task on task.id = dependency.needs
where dependency.task in (select value from {each:ids}) and not dependency.met {own:dependency}
order by dependency.task, dependency.needs;

-- name: dependency_reopen
-- Marks dependencies of these tasks as unmet again, because they are retried. The caller has locked
-- the tasks that wait.
-- rows: pair(task uuid, needs uuid)
update task_dependency set failed = false
from {rows:pair}
where task_dependency.task = pair.task and task_dependency.needs = pair.needs {own:task_dependency};

-- name: unmet_counts
-- Returns the number of unmet and of failed dependencies of tasks.
-- params: ids uuid[]
select dependency.task as id, count(*) as n,
  sum(case when dependency.failed then 1 else 0 end) as failed
from task_dependency dependency
where dependency.task in (select value from {each:ids}) and not dependency.met {own:dependency}
group by dependency.task;

-- name: dependencies_locked
-- Returns the dependencies of a task with their status, locked in id order.
-- params: task uuid
select dependency.needs as id, dependency.met, dependency.failed, task.status
from task_dependency dependency join task on task.id = dependency.needs
where dependency.task = :task {own:dependency}
order by task.id {fragment:lock_tasks};

-- name: slot_outcomes
-- Returns the state of each group slot: whether anything in it is open, failed, or was skipped.
-- params: parent uuid, workspace uuid
select found.slot, max(found.open) as open, max(found.bad) as bad, max(found.skipped) as skipped
from (
  select body.slot,
    case when task.status in {terminal} then 0
      else 1 end as open,
    case when task.status in ('FAILED', 'DEAD', 'CANCELLED') then 1 else 0 end as bad,
    case when task.status = 'SKIPPED' then 1 else 0 end as skipped
  from task_body body join task on task.id = body.task
  where body.group_id = :parent and body.workspace = :workspace
  union all
  select task_group.slot,
    case when task_group.status in {group_open} then 1 else 0 end,
    case when task_group.status in ('FAILED', 'CANCELLED') then 1 else 0 end,
    case when task_group.status = 'SKIPPED' then 1 else 0 end
  from task_group where task_group.parent = :parent {own:task_group}
) found group by found.slot;

-- name: tasks_with_waiters
-- Returns those of the given tasks that an unfinished task still waits for.
-- params: ids uuid[]
select dependency.needs as id from task_dependency dependency
where dependency.needs in (select value from {each:ids})
  and not dependency.met and not dependency.failed {own:dependency}
union
select w.child from child_wait w where w.child in (select value from {each:ids}) {own:w};

-- name: children_skipped
-- Returns the children of a finished group that never had their turn, in id order: tasks and
-- groups.
-- params: parent uuid, workspace uuid, after uuid, most bigint
select found.id, found.is_group, found.hold from (
  select body.task as id, 0 as is_group, task.hold
  from task_body body join task on task.id = body.task
  where body.group_id = :parent and body.workspace = :workspace
    and task.status = 'SKIPPED' and task.hold in ('turn', 'turn:act')
  union all
  select task_group.id, 1, null from task_group
  where task_group.parent = :parent and task_group.status = 'SKIPPED' and task_group.made = 0 {own:task_group}
) found [after: where found.id > :after] order by found.id limit :most;

-- name: flow_failed_tasks
-- Returns the tasks of a flow that failed by themselves up to a given time, in id order; tasks
-- without a failed dependency come first.
-- params: flow uuid, workspace uuid, before timestamptz, most bigint
select found.id from (
  select body.task as id, (select count(*) from task_dependency dependency
    join task needed on needed.id = dependency.needs
    where dependency.task = body.task and not dependency.met
      and needed.status in ('FAILED', 'DEAD', 'CANCELLED', 'SKIPPED')) as failed
  from task_body body join task on task.id = body.task
  where body.flow = :flow and body.workspace = :workspace
    and task.status in ('FAILED', 'DEAD', 'CANCELLED') and task.finished_at <= :before
    and (task.error_class is null or task.error_class <> 'dependency_failed')
) found order by case when found.failed > 0 then 1 else 0 end, found.id limit :most;

-- name: flow_root_by_fire_key
-- Returns the flow that was started before with a fire key, with its first task.
-- params: workspace uuid, fire_key text
select body.task as id, flow.plan from flow
join task_body body on body.flow = flow.id and body.key = flow.key and body.activation = 1
where flow.workspace = :workspace and flow.fire_key = :fire_key;

-- name: flow_by_fire_key
-- Returns the flow that was started before with a fire key.
-- params: workspace uuid, fire_key text
select flow.id from flow where flow.workspace = :workspace and flow.fire_key = :fire_key;

-- name: last_slot
-- Returns the last slot of a group that has a child.
-- params: parent uuid, workspace uuid
select max(body.slot) as slot from task_body body
where body.group_id = :parent and body.workspace = :workspace;

-- name: group_live
-- Returns the newest unfinished run of a group.
-- params: workspace uuid, key text
select task_group.id from task_group
where task_group.workspace = :workspace and task_group.key = :key
  and task_group.status in {group_open}
order by task_group.id desc limit 1;

-- name: dependency_pairs_waiting
-- Returns waiting tasks whose dependencies wait themselves: only these can form a cycle.
-- params: most bigint
select dependency.task as id, dependency.needs, dependency.workspace
from task_dependency dependency
join task on task.id = dependency.task
join task needed on needed.id = dependency.needs
where not dependency.met and not dependency.failed
  and task.status in ('WAITING', 'PAUSED') and needed.status in ('WAITING', 'PAUSED')
order by dependency.task limit :most;

-- name: groups_miscounted
-- Returns running groups whose stored number of open children differs from the rows of their
-- children.
-- params: before timestamptz, most bigint
select {fragment:group_columns}, counted.tasks + counted.groups as actual
from task_group join (
  select task_group.id,
    (select count(*) from task_body body join task on task.id = body.task
      where body.group_id = task_group.id and task.status not in {terminal}) as tasks,
    (select count(*) from task_group child where child.parent = task_group.id
      and child.status in {group_open}) as groups
  from task_group
  where task_group.status = 'RUNNING' and task_group.updated_at < :before
    and task_group.made = task_group.total
    and not exists (select 1 from flow_work where flow_work.workspace = task_group.workspace)
  order by task_group.updated_at limit :most
) counted on counted.id = task_group.id
where counted.tasks + counted.groups <> task_group.open;

-- name: escalation_requests
-- Returns the escalations that failed tasks declare, with the agent that runs their parent or ran
-- it last, if that agent can receive a message: it is not TERMINATED and its mailbox is not full.
-- params: room bigint
-- rows: wanted(task uuid, workspace uuid)
select body.task as id, body.title, body.escalation, body.flow, body.key, body.parent, agent.id as agent
from {rows:wanted}
join task_body body on body.workspace = wanted.workspace and body.task = wanted.task
left join task above on above.id = body.parent and above.workspace = body.workspace
left join agent on agent.workspace = above.workspace and agent.status <> 'TERMINATED'
  and agent.id = coalesce(above.agent, (select attempt.agent from attempt
    where attempt.task = above.id order by attempt.attempt desc limit 1))
  and (select count(*) from (select 1 from message where message.workspace = agent.workspace
    and message.agent = agent.id and message.taken_at is null limit :room) waiting) < :room;

-- name: escalate
-- Inserts escalations of tasks into the inbox, unless it has too many open items.
-- params: now timestamptz, most bigint
-- rows: lost(id uuid, workspace uuid, task uuid, title text, body json)
insert into inbox_item (id, workspace, task, kind, title, body, status, created_at)
select lost.id, lost.workspace, lost.task, 'escalation', lost.title, lost.body, 'OPEN', :now
from {rows:lost}
where (select count(*) from inbox_item item
  where item.workspace = lost.workspace and item.status = 'OPEN') < :most
on conflict do nothing;

-- name: complexity_set
-- Stores the complexity settings of a workspace.
-- params: workspace uuid, rules json
update workspace set complexity = :rules, lanes_version = lanes_version + 1
where workspace.id = :workspace;
