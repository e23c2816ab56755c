"""The vertex programs that come with Syncline, one file each. `syncline/graph.py` lists them."""
