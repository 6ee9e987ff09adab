-- Webhooks: the endpoints of a workspace, their deliveries, and their health.

-- fragment: webhook_columns
w.id, w.workspace, w.url, w.events, w.description, w.enabled, w.disabled_why, w.failures,
  w.closed_until, w.version, w.created_by, w.created_at, w.updated_at

-- name: webhook_add
-- Inserts a webhook unless the workspace has reached its limit.
-- params: id uuid, workspace uuid, url text, events json, description text, key_id text, secret text, created_by text, now timestamptz, most bigint
insert into webhook (id, workspace, url, events, description, key_id, secret, enabled, created_by,
  created_at, updated_at)
select :id, :workspace, :url, :events, :description, :key_id, :secret, true, :created_by, :now, :now
where (select count(*) from webhook w where w.workspace = :workspace) < :most
returning id;

-- name: webhooks
-- Returns the webhooks of a workspace, newest first, after a cursor.
-- params: workspace uuid, before uuid, most bigint
select {fragment:webhook_columns} from webhook w
where w.workspace = :workspace [before: and w.id < :before]
order by w.id desc limit :most;

-- name: webhook
-- Returns one webhook.
-- params: workspace uuid, id uuid
select {fragment:webhook_columns} from webhook w
where w.id = :id and w.workspace = :workspace;

-- name: webhook_locked
-- Returns one webhook with its encrypted secret, locked while it or its deliveries change.
-- params: workspace uuid, id uuid
select {fragment:webhook_columns}, w.key_id, w.secret from webhook w
where w.id = :id and w.workspace = :workspace {lock};

-- name: webhook_update
-- Writes a user's changes. The caller has locked the row.
-- params: id uuid, url text, events json, description text, enabled boolean, disabled_why text, failures bigint, closed_until timestamptz, now timestamptz
update webhook set url = :url, events = :events, description = :description, enabled = :enabled,
  disabled_why = :disabled_why, failures = :failures, closed_until = :closed_until,
  version = version + 1, updated_at = :now
where id = :id {own:webhook};

-- name: webhook_secret_set
-- Replaces a webhook's encrypted secret. The caller has locked the row.
-- params: id uuid, key_id text, secret text, now timestamptz
update webhook set key_id = :key_id, secret = :secret, version = version + 1, updated_at = :now
where id = :id {own:webhook};

-- name: webhook_delete
-- Deletes a webhook; its deliveries stay.
-- params: workspace uuid, id uuid
delete from webhook where id = :id and workspace = :workspace returning id;

-- name: webhook_health_set
-- Stores the health of an endpoint. The caller has locked the row.
-- params: id uuid, failures bigint, closed_until timestamptz
update webhook set failures = :failures, closed_until = :closed_until where id = :id {own:webhook};

-- name: webhook_disable
-- Disables an endpoint and stores the reason. The caller has locked the row.
-- params: id uuid, why text, failures bigint, now timestamptz
update webhook set enabled = false, disabled_why = :why, failures = :failures,
  closed_until = null, version = version + 1, updated_at = :now
where id = :id {own:webhook};

-- fragment: delivery_columns
d.id, d.workspace, d.webhook, d.task, d.event, d.body, d.status, d.attempts, d.next_attempt_at,
  d.response_status, d.error, d.created_at, d.delivered_at

-- name: deliveries
-- Returns the deliveries of a webhook, newest first, after a cursor.
-- params: workspace uuid, webhook uuid, before uuid, most bigint
select {fragment:delivery_columns} from webhook_delivery d
where d.webhook = :webhook and d.workspace = :workspace [before: and d.id < :before]
order by d.id desc limit :most;

-- name: delivery
-- Returns one delivery.
-- params: workspace uuid, id uuid
select {fragment:delivery_columns} from webhook_delivery d
where d.id = :id and d.workspace = :workspace;

-- name: delivery_restart
-- Starts a finished delivery again. The caller has locked its webhook.
-- params: id uuid, now timestamptz
update webhook_delivery set status = 'PENDING', attempts = 0, next_attempt_at = :now,
  response_status = null, error = null, delivered_at = null
where id = :id {own:webhook_delivery} and status <> 'PENDING'
returning id;

-- name: deliveries_cancel
-- Gives up all waiting deliveries of a webhook. The caller has locked or deleted it.
-- params: webhook uuid, why text
update webhook_delivery set status = 'FAILED', next_attempt_at = null, error = :why
where webhook = :webhook and status = 'PENDING' {own:webhook_delivery};

-- fragment: last_event only postgres
-- The last event that a subscriber may be shown, as in `after_cursor`.
(select event.xid, event.position from event
  where event.xid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint
  order by event.xid desc, event.position desc limit 1) last

-- fragment: last_event only sqlite
(select event.xid, event.position from event order by event.position desc limit 1) last

-- fragment: is_ahead
not exists (select 1 from cursor c
  where c.name = :name and (c.xid, c.position) >= (last.xid, last.position))

-- name: fan_out_ahead
-- Returns a row if events wait for the fan-out, and whether any enabled webhook exists.
-- params: name text
select case when exists (select 1 from webhook w where w.enabled) then 1 else 0 end as wanted
from {fragment:last_event} where {fragment:is_ahead};

-- name: fan_out_skip
-- Moves the cursor past all events if there is no webhook. One snapshot sees both, so a webhook
-- that is created meanwhile misses no later event.
-- params: name text, now timestamptz
insert into cursor (name, xid, position, updated_at)
select :name, last.xid, last.position, :now from {fragment:last_event}
where not exists (select 1 from webhook w where w.enabled) and {fragment:is_ahead}
on conflict (name) do update
  set xid = excluded.xid, position = excluded.position, updated_at = excluded.updated_at
  where (cursor.xid, cursor.position) < (excluded.xid, excluded.position);

-- name: webhooks_of
-- Returns the filters of the enabled webhooks of workspaces, locked in id order while deliveries
-- are added.
-- params: workspaces uuid[]
select w.id, w.workspace, w.events, w.created_at from webhook w
where w.enabled and w.workspace in (select value from {each:workspaces})
order by w.id {lock};

-- name: deliveries_add
-- Inserts deliveries, each once. The caller has locked their webhooks.
-- params: now timestamptz
-- rows: message(id uuid, workspace uuid, webhook uuid, task uuid, seq bigint, event text, body text)
insert into webhook_delivery (id, workspace, webhook, task, seq, event, body, status,
  next_attempt_at, created_at)
select message.id, message.workspace, message.webhook, message.task, message.seq, message.event,
  message.body, 'PENDING', :now, :now
from {rows:message}
where true
on conflict do nothing;

-- fragment: is_ready
-- An endpoint that can be called: it is enabled and its circuit is not open.
w.enabled and (w.closed_until is null or w.closed_until <= :now)

-- name: webhooks_ready
-- Returns endpoints with due deliveries, the longest waiting first.
-- params: now timestamptz, most bigint, busy uuid[]
select w.id from webhook w
where {fragment:is_ready} [busy: and w.id not in (select value from {each:busy})]
  and exists (select 1 from webhook_delivery d
    where d.webhook = w.id and d.status = 'PENDING' and d.next_attempt_at <= :now)
order by (select min(d.next_attempt_at) from webhook_delivery d
  where d.webhook = w.id and d.status = 'PENDING'), w.id
limit :most;

-- name: webhooks_locked
-- Returns such endpoints, locked while deliveries are taken; endpoints that another process has
-- locked are skipped.
-- params: ids uuid[], now timestamptz
select w.id, w.workspace, w.url, w.key_id, w.secret, w.failures from webhook w
where w.id in (select value from {each:ids}) and {fragment:is_ready}
order by w.id {skip_locked};

-- fragment: first_due only postgres
-- An array, so that rows are found by key whatever number of rows the planner guesses.
= any (array(select found.id from {each:ids} cross join lateral (
  select each.id from webhook_delivery each
  where each.webhook = ids.value and each.status = 'PENDING' and each.next_attempt_at <= :now
  order by each.next_attempt_at, each.id limit :most) found))

-- fragment: first_due only sqlite
in (select found.value from {each:ids}, json_each((select json_group_array(id) from (
  select each.id from webhook_delivery each
  where each.webhook = ids.value and each.status = 'PENDING' and each.next_attempt_at <= :now
  order by each.next_attempt_at, each.id limit :most))) found)

-- name: deliveries_due
-- Returns a few due deliveries of each given webhook, the longest waiting first. The caller has
-- locked the webhooks.
-- params: ids uuid[], now timestamptz, most bigint
select d.id, d.webhook, d.body, d.attempts from webhook_delivery d
where d.id {fragment:first_due}
order by d.next_attempt_at, d.id;

-- name: deliveries_start
-- Starts an attempt of each delivery and reserves it for this process until a given time.
-- params: ids uuid[], until timestamptz
update webhook_delivery set attempts = attempts + 1, next_attempt_at = :until
where id in (select value from {each:ids});

-- name: webhooks_probe
-- Reserves endpoints for one probe delivery.
-- params: ids uuid[], until timestamptz
update webhook set closed_until = :until where id in (select value from {each:ids});

-- name: webhook_health_locked
-- Returns the health of an endpoint, locked while it changes.
-- params: id uuid
select w.enabled, w.failures, w.closed_until from webhook w where w.id = :id {lock};

-- name: delivery_succeeded
-- Records that the attempt succeeded, if it is the current one.
-- params: id uuid, attempt bigint, response_status bigint, now timestamptz
update webhook_delivery set status = 'DELIVERED', next_attempt_at = null, error = null,
  response_status = :response_status, delivered_at = :now
where id = :id and attempts = :attempt and status = 'PENDING'
returning id;

-- name: delivery_failed
-- Records that the attempt failed, if it is the current one; without a next attempt the delivery
-- has failed.
-- params: id uuid, attempt bigint, response_status bigint, error text, next_attempt_at timestamptz
update webhook_delivery
set status = case when :next_attempt_at is null then 'FAILED' else 'PENDING' end,
  next_attempt_at = :next_attempt_at, response_status = :response_status, error = :error
where id = :id and attempts = :attempt and status = 'PENDING'
returning id;

-- name: deliveries_prune
-- Deletes deliveries that finished long ago, a bounded number.
-- params: before timestamptz, most bigint
delete from webhook_delivery where id in (
  select d.id from webhook_delivery d
  where d.created_at < :before and d.status <> 'PENDING'
  order by d.created_at limit :most)
returning id;
