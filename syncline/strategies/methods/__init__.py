"""The ways of exchanging, one file each. `strategies/table.py` lists them."""
