"""YAML files with definitions, schedules and triggers. No I/O.

manifest: links the definitions of all files and checks them as a whole.
documents: parses each document into definitions, schedules and triggers.
yaml_nodes: parses YAML text into nodes with locations.
decoding: decodes nodes into shapes (typed fields).
shapes: the fields of a file.
tasks: converts shapes of tasks and groups into model objects.
export: writes definitions as YAML.
diff: the changed fields between two versions of a definition.
schema: builds the JSON Schema of the files.
errors: collects validation errors with their locations.
"""
