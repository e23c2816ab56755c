"""What helps to test strategies and models of your own: many workers in one process, quick and repeatable.

Nothing here is used by a real run. Start with `syncline.testing.threads`.
"""
