-- The logins of the programs behind a pooler in transaction mode: once per server, by a superuser,
-- with psql 15 or newer. The pooler passes no role on, so each login brings its own; without it a
-- login may do nothing. Before or after the first migration, as roles.sql.
\getenv password POSTGRES_RUNTIME_PASSWORD
select format('create role %I nologin', name)
from unnest(array['tenuto_runtime', 'tenuto_system']) name
where not exists (select from pg_roles where rolname = name) \gexec
create role tenuto_app_run login noinherit password :'password' in role tenuto_runtime;
alter role tenuto_app_run set role = 'tenuto_runtime';
create role tenuto_app_sys login noinherit password :'password' in role tenuto_system;
alter role tenuto_app_sys set role = 'tenuto_system';
