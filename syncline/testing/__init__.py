"""Tools to test strategies, codecs, collectives and engines of your own: many workers in one process, fast, repeatable.

No real run uses them. Start with `check_strategy` in `syncline.testing.strategy_contract`, which checks whether a
strategy keeps the contract, or with `syncline.testing.trials`, which trains a small model with one.
"""
