"""What helps to test strategies and models of your own: many workers in one process, quick and repeatable.

Nothing here is used by a real run, but for `faults`, which does nothing unless it is told to, and `namespaces`, a
network to break. Start with `check_strategy` in `syncline.testing.strategy_contract`, which tells whether a strategy
keeps its promises, or with `syncline.testing.trials`, which trains a small model under one.
"""
