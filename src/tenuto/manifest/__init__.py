"""YAML files with definitions, schedules and triggers. No I/O.

manifest: links the documents of all files, and checks them as a whole.
documents: reads each document into a definition.
yaml_nodes: parses YAML text into nodes with locations.
decoding: decodes nodes into shapes.
shapes: the fields of a file.
tasks: tasks and groups of files as model objects.
export: writes definitions as YAML.
diff: compares two versions of a definition.
schema: the JSON Schema of the files.
errors: collects all errors with their locations.
"""
