"""The part of a run that lives with the driver: who is there, what happened to them, what to do about it."""
