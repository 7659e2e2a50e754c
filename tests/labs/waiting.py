"""How long tests wait for what takes a moment: Ray, processes, threads, a browser."""

PATIENT_S = 400.0
"""Far more than any of it takes, however much else the machine computes; pytest ends a whole test after 600 s."""
