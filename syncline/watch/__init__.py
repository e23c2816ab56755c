"""A run as a live page, served to this machine alone: `syncline watch RUN`."""
