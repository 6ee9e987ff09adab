-- What a row may look like is checked by whoever writes it and by `orchestrate db check`: PostgreSQL
-- reads the text of a table's checks anew at every statement.

-- only postgres
alter table task
  drop constraint if exists task_check1,
  drop constraint if exists task_check2,
  drop constraint if exists task_check3;
alter table task_body drop constraint if exists task_body_kind_check;
-- end only
