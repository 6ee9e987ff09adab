-- Secrets: named secrets of workspaces, and those of tasks. All are encrypted; no statement sees a
-- plain value.

-- name: secret_put
-- Inserts or updates a secret; returns no row when the workspace has too many others.
-- params: id uuid, workspace uuid, name text, key_id text, data text, use json, actor text, now timestamptz, most bigint
insert into secret (id, workspace, name, key_id, data, use, created_by, created_at, updated_at)
select :id, :workspace, :name, :key_id, :data, :use, :actor, :now, :now
where (select count(*) from secret other
  where other.workspace = :workspace and other.name <> :name) < :most
on conflict (workspace, name) do update
  set key_id = excluded.key_id, data = excluded.data, use = coalesce(excluded.use, secret.use),
    updated_at = excluded.updated_at
returning name;

-- name: secret_locked
-- Returns who can use a secret, locked until the end of the transaction.
-- params: workspace uuid, name text
select secret.name, secret.use from secret
where secret.workspace = :workspace and secret.name = :name {lock};

-- name: secret_use_set
-- Stores who can use a secret. The caller has locked the row.
-- params: workspace uuid, name text, use json, now timestamptz
update secret set use = :use, updated_at = :now
where workspace = :workspace and name = :name;

-- name: secrets_restricted
-- Returns the secrets of a workspace that restrict who can use them.
-- params: workspace uuid
select secret.name, secret.use from secret
where secret.workspace = :workspace and secret.use is not null;

-- name: secret_delete
-- Deletes a secret.
-- params: workspace uuid, name text
delete from secret where workspace = :workspace and name = :name returning name;

-- name: secrets
-- Returns the visible fields of a workspace's secrets.
-- params: workspace uuid, most bigint
select secret.name, secret.key_id, secret.use, secret.created_by, secret.created_at, secret.updated_at
from secret where secret.workspace = :workspace order by secret.name limit :most;

-- name: secrets_by_name
-- Returns the secrets of a workspace that have one of the names.
-- params: workspace uuid, names text[]
select secret.name, secret.key_id, secret.data, secret.use from secret
where secret.workspace = :workspace and secret.name in (select value from {each:names});

-- name: task_secrets
-- Returns the encrypted secrets of tasks.
-- params: ids uuid[]
select task_secret.task, task_secret.key_id, task_secret.data from task_secret
where task_secret.task in (select value from {each:ids}) {own:task_secret};

-- name: task_secret_marks
-- Returns the stored fields of a task in which a secret was masked or is referenced; other fields
-- are not read.
-- params: id uuid, mask text, reference text
select task.id, task.workspace,
  case when cast(body.input as text) like :mask or cast(body.input as text) like :reference
    then body.input end as input,
  case when cast(body.env as text) like :reference then body.env end as env
from task join task_body body on body.workspace = task.workspace and body.task = task.id
where task.id = :id {own:task};

-- name: secrets_with_old_key
-- Returns secrets that were encrypted with one of the keys; rows that another process has locked
-- are skipped.
-- params: keys text[], most bigint
select secret.id, secret.workspace, secret.name as place, secret.key_id, secret.data from secret
where secret.key_id in (select value from {each:keys})
order by secret.id limit :most {skip_locked};

-- name: secrets_reencrypt
-- Replaces encrypted values. The caller has locked the rows.
-- rows: fresh(id uuid, key_id text, data text)
update secret set key_id = fresh.key_id, data = fresh.data
from {rows:fresh} where secret.id = fresh.id;

-- name: task_secrets_with_old_key
-- Returns task secrets that were encrypted with one of the keys; rows that another process has
-- locked are skipped.
-- params: keys text[], most bigint
select task_secret.task as id, task_secret.workspace, cast(task_secret.task as text) as place,
  task_secret.key_id, task_secret.data
from task_secret
where task_secret.key_id in (select value from {each:keys})
order by task_secret.task limit :most {skip_locked};

-- name: task_secrets_reencrypt
-- Replaces encrypted values of task secrets. The caller has locked the rows.
-- rows: fresh(id uuid, key_id text, data text)
update task_secret set key_id = fresh.key_id, data = fresh.data
from {rows:fresh} where task_secret.task = fresh.id;

-- name: webhook_secrets_with_old_key
-- Returns signing secrets of webhooks that were encrypted with one of the keys; rows that another
-- process has locked are skipped.
-- params: keys text[], most bigint
select webhook.id, webhook.workspace, cast(webhook.id as text) as place, webhook.key_id,
  webhook.secret as data
from webhook
where webhook.key_id in (select value from {each:keys})
order by webhook.id limit :most {skip_locked};

-- name: webhook_secrets_reencrypt
-- Replaces encrypted signing secrets of webhooks. The caller has locked the rows.
-- rows: fresh(id uuid, key_id text, data text)
update webhook set key_id = fresh.key_id, secret = fresh.data
from {rows:fresh} where webhook.id = fresh.id;

-- name: task_edited
-- Returns a row if a user edited a task or assigned it to another agent.
-- params: workspace uuid, id uuid
select event.seq from event
where event.workspace = :workspace and event.task = :id
  and event.kind in ('edited', 'assigned')
limit 1;
