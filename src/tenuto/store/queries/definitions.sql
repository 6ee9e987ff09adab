-- Definitions: reusable descriptions of tasks and groups, by key.

-- fragment: definition_columns
d.id, d.key, d.kind, d.spec, d.version, d.created_at, d.updated_at

-- name: definitions
-- Returns the definitions of a workspace, newest first, after a cursor; only one kind if it is
-- given.
-- params: workspace uuid, before uuid, kind text, most bigint
select {fragment:definition_columns} from definition d
where d.workspace = :workspace [before: and d.id < :before] [kind: and d.kind = :kind]
order by d.id desc limit :most;

-- name: definitions_by_key
-- Returns the definitions that have one of the keys.
-- params: workspace uuid, keys text[]
select {fragment:definition_columns} from definition d
where d.workspace = :workspace and d.key in (select value from {each:keys});

-- name: definitions_locked
-- Returns the definitions that have one of the keys, locked until the end of the transaction.
-- params: workspace uuid, keys text[]
select {fragment:definition_columns} from definition d
where d.workspace = :workspace and d.key in (select value from {each:keys})
order by d.key {lock};

-- name: definition_count
-- Returns the number of definitions in a workspace.
-- params: workspace uuid
select count(*) as n from definition d where d.workspace = :workspace;

-- name: definitions_add
-- Inserts definitions; returns those whose keys were free.
-- params: workspace uuid, now timestamptz
-- rows: made(id uuid, key text, kind text, spec json)
insert into definition (id, workspace, key, kind, spec, created_at, updated_at)
select made.id, :workspace, made.key, made.kind, made.spec, :now, :now from {rows:made}
where true
on conflict (workspace, key) do nothing
returning key;

-- name: definitions_update
-- Writes changed definitions. The caller has locked the rows.
-- params: now timestamptz
-- rows: changed(id uuid, kind text, spec json)
update definition set kind = changed.kind, spec = changed.spec, version = version + 1,
  updated_at = :now
from {rows:changed} where definition.id = changed.id {own:definition};

-- name: definition_delete
-- Deletes a definition that the caller has locked.
-- params: id uuid
delete from definition where id = :id {own:definition};
