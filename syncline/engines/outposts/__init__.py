"""Places for workers on machines that others have started: Ray, Spark, torchrun, Slurm, MPI, a shell over ssh.

An outpost is a process that one of them runs. It calls the driver, and starts, watches and ends workers there as the
local engine does here. So every engine has the same workers, and differs only in how its outposts come to be.
"""
