"""How bytes and tensors move between the processes of a run; nothing here knows why they move."""
