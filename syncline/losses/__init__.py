"""Losses that torch.nn lacks: functions of output and target that give the mean over the samples."""
