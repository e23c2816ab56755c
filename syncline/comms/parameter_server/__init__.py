"""Parameters that live with servers: each holds one part (a shard), workers push gradients and pull parameters.

    partition.cut_rows   which part of the flat vector of all parameters is whose (`syncline.algorithms.partition`)
    pieces.py            what of which parameter lies in a part
    shell.py             a worker's optimiser without its parameters, and its state cut along those parts
    shard.py             one part: parameters, optimiser, versions, clocks and the three rules; no sockets
    messages.py          what is said on a connection
    mailbox.py           memory that a worker and a server on one host share
    connection.py        authenticated connections, frames, limits
    server.py            `serve`: the loop around one shard
    client.py            `ParameterServers`: a worker's view of all the shards

Not here: when a worker pushes and pulls and what it does with the answers (strategies), and who starts the servers.
"""
