"""The example that everything has to load, as its author indented it and as it is often copied."""

S2 = """\
id: task-200
name: "Transform raw data"
prompt: "Clean and normalize raw input data."
container: "data-worker:v1.0"
resolve_time_estimate: 20
task_tags:
  - DATA_INGESTION
complexity_level: Low
schedule:
  type: immediate
group_id: "group-preprocessing"
tools:
  - python:3.11
  - pip:latest
escalation:
  reason: "Validation failed"
  prompt: "Please inspect input data and retry."
"""
S2_FLAT = "\n".join(line.strip() for line in S2.splitlines())
FLOW = """\
tasks:
  - id: fetch
    name: Fetch
    prompt: Fetch the pages.
    next_task: each
  - id: each
    foreach_items: {$from: fetch, path: pages}
    foreach_template_task_id: summarise
    foreach_order: parallel
    foreach_join: all_done
    next_task: good-enough
  - id: summarise
    prompt: Summarise the page.
    retry: {attempts: 5, backoff: fixed, base_s: 2}
  - id: good-enough
    condition: result.score > 0.5
    true_next_task_id: sign-off
    false_next_task_id: again
  - id: again
    goto_target_task_id: fetch
    goto_prompt: Look further.
  - id: sign-off
    approval: {message: "Publish it?", timeout_s: 3600, on_reject: skip}
groups:
  - id: nightly
    name: Every night
    type: Sequential
    children:
      - {child_id: clean, kind: Group}
      - fetch
    next: {child_id: report, kind: Task}
  - id: clean
    type: Parallel
    join: all_done
    children: [clean-a, clean-b]
---
tasks:
  - {id: clean-a, command: [make, clean-a]}
  - {id: clean-b, command: [make, clean-b], depends_on: [clean-a]}
  - {id: report, prompt: Write the report.}
"""
