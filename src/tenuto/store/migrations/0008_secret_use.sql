-- Who may use a named secret, as JSON: role, agents, definitions. Null means every MEMBER.

alter table secret add column use json;
