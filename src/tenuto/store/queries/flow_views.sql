-- Views of flows and groups for users.

-- name: flow_progress
-- Returns the progress and cost of a flow's tasks.
-- params: flow uuid, workspace uuid
select count(*) as tasks,
  sum(case when task.status in {terminal} then 100
    else coalesce(task.progress_percent, 0) end) as percents,
  (select sum(spending.cost_usd) from spending join task_body spent on spent.task = spending.task
    where spent.flow = :flow and spent.workspace = :workspace) as cost_usd
from task_body body join task on task.id = body.task
where body.flow = :flow and body.workspace = :workspace;

-- name: flow_groups_open
-- Returns the unfinished group runs of a flow, oldest first.
-- params: flow uuid, workspace uuid, most bigint
select {fragment:group_columns} from task_group
where task_group.flow = :flow and task_group.workspace = :workspace
  and task_group.status in {group_open}
order by task_group.id limit :most;

-- name: flow_failures
-- Returns the tasks of a flow that failed, oldest first.
-- params: flow uuid, workspace uuid, most bigint
select task.id, body.key, body.title, task.status, task.last_error
from task_body body join task on task.id = body.task
where body.flow = :flow and body.workspace = :workspace and task.status in ('FAILED', 'DEAD')
order by task.id limit :most;

-- fragment: node_columns
found.id, found.key, found.title, found.kind, found.status, found.activation, found.parent,
  found.slot, found.progress_percent, found.made, found.is_group, found.last_error,
  found.created_at

-- fragment: task_node
body.task as id, body.key, body.title, body.kind, task.status, body.activation,
  body.group_id as parent, body.slot, task.progress_percent, 0 as made, 0 as is_group,
  task.last_error, task.created_at

-- fragment: group_node
task_group.id, task_group.key, task_group.title, task_group.kind, task_group.status,
  task_group.activation, task_group.parent, task_group.slot, null, task_group.made, 1,
  null, task_group.created_at

-- name: flow_graph
-- Returns the tasks and groups that were activated in a flow, oldest first; with `live` only
-- unfinished ones.
-- params: flow uuid, workspace uuid, most bigint
select {fragment:node_columns} from (
  select {fragment:task_node}
  from task_body body join task on task.id = body.task
  where body.flow = :flow and body.workspace = :workspace
    [live: and task.status not in {terminal}]
  union all
  select {fragment:group_node}
  from task_group where task_group.flow = :flow and task_group.workspace = :workspace
    [live: and task_group.status in {group_open}]
) found order by found.created_at, found.id limit :most;

-- name: group_graph
-- Returns a group run and the tasks and groups activated in it, direct and nested, oldest first.
-- params: group_id uuid, workspace uuid, most bigint
{fragment:subtree}
select {fragment:node_columns} from (
  select {fragment:task_node}
  from task_body body join task on task.id = body.task
  where body.group_id in (select inside.id from inside) and body.workspace = :workspace
    [live: and task.status not in {terminal}]
  union all
  select {fragment:group_node}
  from task_group where task_group.id in (select inside.id from inside) {own:task_group}
    [live: and task_group.status in {group_open}]
) found order by found.created_at, found.id limit :most;

-- name: flow_dependencies
-- Returns the dependencies between the tasks of a flow.
-- params: flow uuid, workspace uuid, most bigint
select dependency.task, dependency.needs
from task_body body join task_dependency dependency on dependency.task = body.task
where body.flow = :flow and body.workspace = :workspace
order by dependency.task, dependency.needs limit :most;

-- name: flow_tasks
-- Returns the tasks of a flow, newest first.
-- params: flow uuid, workspace uuid, before uuid, most bigint
select {columns:task}, body.title, body.task_type, body.key, body.flow, body.group_id,
  (select agent.name from agent where agent.id = task.agent) as agent_name
from task_body body join task on task.id = body.task
where body.flow = :flow and body.workspace = :workspace
  [before: and body.task < :before]
order by body.task desc limit :most;

-- name: dependencies_of_tasks
-- Returns the dependencies of tasks, met or not.
-- params: task uuid, workspace uuid
select dependency.needs as id from task_dependency dependency
where dependency.task = :task and dependency.workspace = :workspace
order by dependency.needs;
