-- Webhooks: the endpoints of a workspace, what they are told, and how they answer.

-- fragment: webhook_columns
w.id, w.workspace, w.url, w.events, w.description, w.enabled, w.disabled_why, w.failures,
  w.closed_until, w.version, w.created_by, w.created_at, w.updated_at

-- name: webhook_add
-- Add a webhook unless the workspace has as many as it may.
-- params: id uuid, workspace uuid, url text, events json, description text, key_id text, secret text, created_by text, now timestamptz, most bigint
insert into webhook (id, workspace, url, events, description, key_id, secret, enabled, created_by,
  created_at, updated_at)
select :id, :workspace, :url, :events, :description, :key_id, :secret, true, :created_by, :now, :now
where (select count(*) from webhook w where w.workspace = :workspace) < :most
returning id;

-- name: webhooks
-- The webhooks of a workspace, newest first, after a cursor.
-- params: workspace uuid, before uuid, most bigint
select {fragment:webhook_columns} from webhook w
where w.workspace = :workspace [before: and w.id < :before]
order by w.id desc limit :most;

-- name: webhook
-- One webhook.
-- params: workspace uuid, id uuid
select {fragment:webhook_columns} from webhook w
where w.id = :id and w.workspace = :workspace;

-- name: webhook_locked
-- One webhook with its sealed secret, held while it or its deliveries change.
-- params: workspace uuid, id uuid
select {fragment:webhook_columns}, w.key_id, w.secret from webhook w
where w.id = :id and w.workspace = :workspace {lock};

-- name: webhook_set
-- Write what a person changed. The caller holds the row.
-- params: id uuid, url text, events json, description text, enabled boolean, disabled_why text, failures bigint, closed_until timestamptz, now timestamptz
update webhook set url = :url, events = :events, description = :description, enabled = :enabled,
  disabled_why = :disabled_why, failures = :failures, closed_until = :closed_until,
  version = version + 1, updated_at = :now
where id = :id {own:webhook};

-- name: webhook_secret
-- Replace a webhook's sealed secret. The caller holds the row.
-- params: id uuid, key_id text, secret text, now timestamptz
update webhook set key_id = :key_id, secret = :secret, version = version + 1, updated_at = :now
where id = :id {own:webhook};

-- name: webhook_remove
-- Remove a webhook; its deliveries stay.
-- params: workspace uuid, id uuid
delete from webhook where id = :id and workspace = :workspace returning id;

-- name: webhook_health
-- Note how an endpoint answers. The caller holds the row.
-- params: id uuid, failures bigint, closed_until timestamptz
update webhook set failures = :failures, closed_until = :closed_until where id = :id {own:webhook};

-- name: webhook_disable
-- Send nothing more to an endpoint and say why. The caller holds the row.
-- params: id uuid, why text, failures bigint, now timestamptz
update webhook set enabled = false, disabled_why = :why, failures = :failures,
  closed_until = null, version = version + 1, updated_at = :now
where id = :id {own:webhook};

-- fragment: delivery_columns
d.id, d.workspace, d.webhook, d.task, d.event, d.body, d.status, d.attempts, d.next_attempt_at,
  d.response_status, d.error, d.created_at, d.delivered_at

-- name: deliveries
-- The deliveries of a webhook, newest first, after a cursor.
-- params: workspace uuid, webhook uuid, before uuid, most bigint
select {fragment:delivery_columns} from webhook_delivery d
where d.webhook = :webhook and d.workspace = :workspace [before: and d.id < :before]
order by d.id desc limit :most;

-- name: delivery
-- One delivery.
-- params: workspace uuid, id uuid
select {fragment:delivery_columns} from webhook_delivery d
where d.id = :id and d.workspace = :workspace;

-- name: delivery_again
-- Start over with a delivery that ended. The caller holds its webhook.
-- params: id uuid, now timestamptz
update webhook_delivery set status = 'PENDING', attempts = 0, next_attempt_at = :now,
  response_status = null, error = null, delivered_at = null
where id = :id {own:webhook_delivery} and status <> 'PENDING'
returning id;

-- name: deliveries_end
-- Give up everything that waits for a webhook. The caller holds it, or has removed it.
-- params: webhook uuid, why text
update webhook_delivery set status = 'FAILED', next_attempt_at = null, error = :why
where webhook = :webhook and status = 'PENDING' {own:webhook_delivery};

-- fragment: last_event only postgres
-- The last event that a subscriber may be shown, as in `from_there_on`.
(select event.xid, event.position from event
  where event.xid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint
  order by event.xid desc, event.position desc limit 1) last

-- fragment: last_event only sqlite
(select event.xid, event.position from event order by event.position desc limit 1) last

-- fragment: is_ahead
not exists (select 1 from cursor c
  where c.name = :name and (c.xid, c.position) >= (last.xid, last.position))

-- name: fan_out_ahead
-- Whether events wait for the fan-out: a row if there are any, with whether anybody wants them.
-- params: name text
select case when exists (select 1 from webhook w where w.enabled) then 1 else 0 end as wanted
from {fragment:last_event} where {fragment:is_ahead};

-- name: fan_out_skip
-- Move past all events if there is no webhook. One snapshot sees both, so none that is made
-- meanwhile misses an event that came after it.
-- params: name text, now timestamptz
insert into cursor (name, xid, position, updated_at)
select :name, last.xid, last.position, :now from {fragment:last_event}
where not exists (select 1 from webhook w where w.enabled) and {fragment:is_ahead}
on conflict (name) do update
  set xid = excluded.xid, position = excluded.position, updated_at = excluded.updated_at
  where (cursor.xid, cursor.position) < (excluded.xid, excluded.position);

-- name: webhooks_of
-- What the enabled webhooks of workspaces ask for, held in id order while deliveries are added.
-- params: workspaces uuid[]
select w.id, w.workspace, w.events, w.created_at from webhook w
where w.enabled and w.workspace in (select value from {each:workspaces})
order by w.id {lock};

-- name: deliveries_add
-- Add deliveries, each once. The caller holds their webhooks.
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
-- An endpoint that may be called: nobody turned it off, and it is not left alone.
w.enabled and (w.closed_until is null or w.closed_until <= :now)

-- name: webhooks_ready
-- Endpoints that deliveries are due for, the longest waiting first.
-- params: now timestamptz, most bigint, busy uuid[]
select w.id from webhook w
where {fragment:is_ready} [busy: and w.id not in (select value from {each:busy})]
  and exists (select 1 from webhook_delivery d
    where d.webhook = w.id and d.status = 'PENDING' and d.next_attempt_at <= :now)
order by (select min(d.next_attempt_at) from webhook_delivery d
  where d.webhook = w.id and d.status = 'PENDING'), w.id
limit :most;

-- name: webhooks_taken
-- Such endpoints, held while deliveries are taken, unless somebody else does that.
-- params: ids uuid[], now timestamptz
select w.id, w.workspace, w.url, w.key_id, w.secret, w.failures from webhook w
where w.id in (select value from {each:ids}) and {fragment:is_ready}
order by w.id {skip_locked};

-- fragment: first_due only postgres
-- An array, so that rows are found by key whatever the planner guesses their number to be.
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
-- A few due deliveries of each of some webhooks, the longest waiting first. The caller holds those.
-- params: ids uuid[], now timestamptz, most bigint
select d.id, d.webhook, d.body, d.attempts from webhook_delivery d
where d.id {fragment:first_due}
order by d.next_attempt_at, d.id;

-- name: deliveries_take
-- Begin an attempt at each, and keep the others away until an instant.
-- params: ids uuid[], until timestamptz
update webhook_delivery set attempts = attempts + 1, next_attempt_at = :until
where id in (select value from {each:ids});

-- name: webhooks_probe
-- Keep everybody else away from endpoints that one delivery tries out.
-- params: ids uuid[], until timestamptz
update webhook set closed_until = :until where id in (select value from {each:ids});

-- name: webhook_held
-- How an endpoint answered so far, held while that changes.
-- params: id uuid
select w.enabled, w.failures, w.closed_until from webhook w where w.id = :id {lock};

-- name: delivery_done
-- The attempt succeeded, if it is the current one.
-- params: id uuid, attempt bigint, response_status bigint, now timestamptz
update webhook_delivery set status = 'DELIVERED', next_attempt_at = null, error = null,
  response_status = :response_status, delivered_at = :now
where id = :id and attempts = :attempt and status = 'PENDING'
returning id;

-- name: delivery_failed
-- The attempt failed, if it is the current one; without a next one the delivery has.
-- params: id uuid, attempt bigint, response_status bigint, error text, next_attempt_at timestamptz
update webhook_delivery
set status = case when :next_attempt_at is null then 'FAILED' else 'PENDING' end,
  next_attempt_at = :next_attempt_at, response_status = :response_status, error = :error
where id = :id and attempts = :attempt and status = 'PENDING'
returning id;

-- name: deliveries_prune
-- Forget deliveries that ended long ago, a bounded number.
-- params: before timestamptz, most bigint
delete from webhook_delivery where id in (
  select d.id from webhook_delivery d
  where d.created_at < :before and d.status <> 'PENDING'
  order by d.created_at limit :most)
returning id;
