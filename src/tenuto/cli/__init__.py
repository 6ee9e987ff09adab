"""The `orchestrate` command. Commands import what they need when they run, so help stays fast."""
