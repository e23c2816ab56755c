"""DeSTIN: a hierarchy of nodes that learn clusters and report beliefs, without labels and without gradients.

The network is `network.py`; it is trained by name, as `destin` (`models/zoo/destin.py`).
"""
