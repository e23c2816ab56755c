"""The live page of a run, served on loopback: `syncline watch RUN`."""
