"""What people see while it trains.

Here: observers of a run's events, which draw on a terminal, write plain lines or JSON, or keep quiet. Not here: the
events (`telemetry/`), and reports on runs that are over.
"""
