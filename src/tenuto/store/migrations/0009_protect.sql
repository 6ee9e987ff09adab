-- The tenancy policy of a table, as one function for this and all later migrations. After
-- `create table name (...)` with a column `workspace`, or without one if only the system reads it:
--
--     -- only postgres
--     select tenuto_protect('name');
--     -- end only

-- only postgres
-- A tenant sees and writes the rows of its workspace, the system those of all; the owner of the
-- table is bound, too. Repeating the call changes nothing. It runs with the rights of its caller,
-- who must own the table.
create function tenuto_protect(table_name text) returns void language plpgsql as $body$
declare
  own text := '(select nullif(current_setting(''app.workspace'', true), '''')::uuid)'\;
begin
  execute format('alter table %I enable row level security', table_name)\;
  execute format('alter table %I force row level security', table_name)\;
  execute format('grant select, insert, update, delete on %I to tenuto_system', table_name)\;
  execute format('drop policy if exists system on %I', table_name)\;
  execute format('create policy system on %I to tenuto_system using (true) with check (true)',
    table_name)\;
  if exists (select from pg_attribute a where a.attrelid = format('%I', table_name)::regclass
      and a.attname = 'workspace' and not a.attisdropped) then
    execute format('grant select, insert, update, delete on %I to tenuto_runtime', table_name)\;
    execute format('drop policy if exists tenant on %I', table_name)\;
    execute format('create policy tenant on %I to tenuto_runtime using (workspace = %s)'
      ' with check (workspace = %s)', table_name, own, own)\;
  end if\;
end $body$;
-- The tables are those of the schema of this installation, whatever the caller's search path.
do $body$
begin
  execute format('alter function tenuto_protect(text) set search_path = %I, pg_temp',
    current_schema())\;
end $body$;
-- A table of each kind, to the policies that it has.
select tenuto_protect('transcript_size');
select tenuto_protect('gateway');
-- end only
