"""Services and tools: up, serve, worker, coordinator, db, doctor, top, bench, chaos.

serve: everything that runs until it is stopped. demo: `up --demo`. top: the live view.
doctor: checks this machine. db: migrates and checks the database.
bench: measurements. chaos: faults on purpose.
"""
