-- Model usage of attempts, and budgets.

-- name: usage_add
-- Adds usage of an attempt, if its fence is current and the number of the report was not counted
-- yet.
-- params: workspace uuid, task uuid, attempt bigint, token text, model text, input_tokens bigint, output_tokens bigint, cost_usd double precision, number bigint, now timestamptz
insert into spending (task, attempt, model, workspace, agent, input_tokens, output_tokens, cost_usd,
  last, at)
select task.id, task.attempt, :model, task.workspace, task.agent, :input_tokens, :output_tokens,
  :cost_usd, :number, :now
from task
where {fragment:fence_is_current}
on conflict (task, attempt, model) do update
  set input_tokens = spending.input_tokens + excluded.input_tokens,
  output_tokens = spending.output_tokens + excluded.output_tokens,
  cost_usd = spending.cost_usd + excluded.cost_usd,
  last = {greatest}(spending.last, excluded.last), at = excluded.at
  where spending.workspace = excluded.workspace
    and (excluded.last = 0 or excluded.last > spending.last)
returning task as id, workspace, agent;

-- name: usage_task
-- Returns the task of an attempt whose fence is current.
-- params: workspace uuid, task uuid, attempt bigint, token text
select task.id from task
where {fragment:fence_is_current};

-- name: usage_of_task
-- Returns the usage of a task's attempts by model.
-- params: task uuid
select spending.attempt, spending.model, spending.input_tokens, spending.output_tokens,
  spending.cost_usd
from spending where spending.task = :task {own:spending} order by spending.attempt, spending.model;

-- fragment: usage_sums
cast(coalesce(sum(spending.input_tokens), 0) as bigint) as input_tokens,
  cast(coalesce(sum(spending.output_tokens), 0) as bigint) as output_tokens,
  coalesce(sum(spending.cost_usd), 0.0) as cost_usd

-- name: usage_stats
-- Returns the usage of a workspace since a given time, and in total.
-- params: workspace uuid, since timestamptz
select {fragment:usage_sums},
  cast(coalesce(sum(case when spending.at >= :since
    then spending.input_tokens + spending.output_tokens end), 0) as bigint) as tokens_since,
  coalesce(sum(case when spending.at >= :since then spending.cost_usd end), 0.0) as cost_since
from spending where spending.workspace = :workspace;

-- name: budgets_above
-- Returns the budgets of a task and of the tasks above it, nearest first.
-- params: task uuid, workspace uuid, most bigint
with recursive above(task, parent, budget, title, depth) as (
  select body.task, body.parent, body.budget, body.title, 0 from task_body body
  where body.workspace = :workspace and body.task = :task
  union all
  select body.task, body.parent, body.budget, body.title, above.depth + 1
  from above join task_body body on body.workspace = :workspace and body.task = above.parent
  where above.depth < :most
)
select above.task as id, above.budget, above.title from above
where above.budget is not null order by above.depth;

-- fragment: tree
-- A task and its subtasks, direct and indirect.
with recursive tree(task) as (
  select body.task from task_body body where body.workspace = :workspace and body.task = :task
  union
  select body.task from tree
  join task_body body on body.workspace = :workspace and body.parent = tree.task
)

-- name: tree_usage
-- Returns the usage of a task and all its subtasks.
-- params: task uuid, workspace uuid
{fragment:tree}
select {fragment:usage_sums}
from tree join spending on spending.task = tree.task;

-- name: tree_waiting_for_budget
-- Returns the tasks of a tree that wait for its budget, in id order.
-- params: task uuid, workspace uuid, hold text, most bigint
{fragment:tree}
select task.id from tree join task on task.id = tree.task
where task.hold = :hold
  and task.status not in {terminal}
order by task.id limit :most;

-- name: budget_question
-- Returns the open inbox item about a task's budget, if there is one.
-- params: task uuid, workspace uuid
select inbox_item.id from inbox_item
where inbox_item.task = :task and inbox_item.workspace = :workspace
  and inbox_item.kind = 'budget' and inbox_item.status = 'OPEN';

-- name: budget_set
-- Stores another budget of a task.
-- params: task uuid, workspace uuid, budget json
update task_body set budget = :budget
where task_body.workspace = :workspace and task_body.task = :task
returning task as id;
