"""The user's data in files: image folders, tables, LMDB; local or remote.

`options.py` has the options of a path, `store.py` the file access, `find.py` detects the format. Each format has its
own file. The driver scans the files once and sends the `Manifest` to every worker; `source.py` then reads samples by
index.
"""
