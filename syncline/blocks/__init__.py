"""Fitting by blocks of parameters: the scheduler, the loop and the apps. `syncline/fitting.py` has what users call."""
