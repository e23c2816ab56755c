"""Workers on machines that Ray, Spark, torchrun, Slurm, MPI or ssh provides.

Each of these starts *node agents*. An agent connects to the driver, and starts, watches and ends workers on its node as
the local engine does on this machine. So every engine runs the same workers, and differs only in how agents start.
"""
