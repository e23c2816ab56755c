"""Data that a user has in files: images in folders, tables, LMDB; here or on a remote store.

`options.py` says what may be given with a path, `store.py` where files are, `find.py` which format they have. Each
format has its own file: what is in the files is found out first (a `Survey`, which the driver makes and every worker
gets), and `source.py` then reads samples by number. `layout.py` has the arithmetic from a number to a place in a file.
"""
