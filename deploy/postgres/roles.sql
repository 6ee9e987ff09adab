-- The login of the programs: once per server, by a superuser, with psql 15 or newer. Before or
-- after the first migration, which makes the two groups when they are not there.
\getenv password POSTGRES_RUNTIME_PASSWORD
select format('create role %I nologin', name)
from unnest(array['tenuto_runtime', 'tenuto_system']) name
where not exists (select from pg_roles where rolname = name) \gexec
create role tenuto_app login password :'password' in role tenuto_runtime, tenuto_system;
