-- Mailboxes: messages to agents, until the agents dequeue them.

-- fragment: message_columns
message.id, message.agent, message.kind, message.scope_key, message.coalescable,
  message.client_message_id, message.batch_id, message.body, message.task, message.attempt,
  message.sender, message.created_at, message.taken_at, message.replaced

-- name: message_by_client_id
-- Returns the earlier message with the same id from the sender.
-- params: workspace uuid, agent uuid, client_message_id text
select {fragment:message_columns} from message
where message.workspace = :workspace and message.agent = :agent
  and message.client_message_id = :client_message_id;

-- name: messages_replace
-- Removes waiting messages from a mailbox that a newer message of the same kind and scope replaces.
-- params: workspace uuid, agent uuid, kind text, scope_key text, now timestamptz
update message set taken_at = :now, replaced = true
where message.workspace = :workspace and message.agent = :agent and message.taken_at is null
  and message.coalescable and message.kind = :kind
  and coalesce(message.scope_key, '') = coalesce(:scope_key, '')
returning id;

-- name: messages_waiting
-- Returns how many messages wait for an agent, up to `most`.
-- params: workspace uuid, agent uuid, most bigint
select count(*) as n from (select 1 from message
  where message.workspace = :workspace and message.agent = :agent and message.taken_at is null
  limit :most) waiting;

-- name: messages_waiting_by_name
-- Returns how many messages wait for the agents of these names together, up to `most`.
-- params: workspace uuid, names text[], most bigint
select count(*) as n from (select 1 from agent
  join message on message.workspace = agent.workspace and message.agent = agent.id
    and message.taken_at is null
  where agent.workspace = :workspace and agent.name in (select value from {each:names})
  limit :most) waiting;

-- name: messages_add
-- Inserts messages into mailboxes.
-- params: now timestamptz
-- rows: sent(id uuid, workspace uuid, agent uuid, kind text, scope_key text, coalescable boolean, client_message_id text, body json, task uuid, attempt bigint, sender text)
insert into message (id, workspace, agent, kind, scope_key, coalescable, client_message_id, body,
  task, attempt, sender, created_at)
select sent.id, sent.workspace, sent.agent, sent.kind, sent.scope_key,
  sent.coalescable, sent.client_message_id, sent.body, sent.task, sent.attempt,
  sent.sender, :now
from {rows:sent};

-- name: message_page
-- Returns messages of an agent, oldest first, after a cursor: the waiting ones, or all that are
-- stored.
-- params: workspace uuid, agent uuid, after uuid, most bigint, waiting boolean
select {fragment:message_columns} from message
where message.workspace = :workspace and message.agent = :agent
  [waiting: and message.taken_at is null]
  [after: and message.id > :after]
order by message.id limit :most;

-- name: messages_dequeue
-- Dequeues the oldest waiting messages of an agent as one batch.
-- params: workspace uuid, agent uuid, batch uuid, most bigint, now timestamptz
-- as: picked(id)
select message.id from message
where message.workspace = :workspace and message.agent = :agent and message.taken_at is null
order by message.id limit :most {skip_locked};
update message set taken_at = :now, batch_id = :batch
where message.id in (select picked.id from {picked});

-- name: messages_of_batch
-- Returns the messages that were dequeued as one batch, oldest first.
-- params: workspace uuid, agent uuid, batch uuid
select {fragment:message_columns} from message
where message.workspace = :workspace and message.agent = :agent and message.batch_id = :batch
order by message.id;

-- name: messages_prune
-- Deletes messages that were dequeued long ago, a bounded number.
-- params: before timestamptz, most bigint
delete from message where id in (
  select gone.id from message gone where gone.taken_at < :before order by gone.taken_at limit :most)
returning id;
