"""Commands for services and tools: up, serve, worker, coordinator, db, doctor, top, bench, chaos.

serve: up, serve, worker, coordinator. demo: `up --demo`. top: the live view.
doctor: checks this machine. db: migrates and checks the database.
bench: measures performance. chaos: injects faults into a test deployment.
"""
