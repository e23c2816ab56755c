"""What people see of a run: `terminal/` views, the HTML `report/`, the `live/` page, and the `page/` both share.

Here: observers of a run's events, and what they compute from them. Not here: the events (`telemetry/`).
"""
