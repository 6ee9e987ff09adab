-- What the attempts' transcripts take, so that a store keeps only so much of each.

create table transcript_size (
  task uuid not null,
  attempt bigint not null,
  workspace uuid not null,
  bytes bigint not null,
  primary key (task, attempt)
);

-- only postgres
-- As of the tables before: a tenant sees its own rows, the system all.
alter table transcript_size enable row level security;
alter table transcript_size force row level security;
grant select, insert, update, delete on transcript_size to tenuto_system, tenuto_runtime;
create policy system on transcript_size to tenuto_system using (true) with check (true);
create policy tenant on transcript_size to tenuto_runtime
  using (workspace = (select nullif(current_setting('app.workspace', true), '')::uuid))
  with check (workspace = (select nullif(current_setting('app.workspace', true), '')::uuid));
-- end only
