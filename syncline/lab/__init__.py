"""Measuring and breaking runs: benchmarks, fault injection, emulated clusters. Nothing else imports it."""
