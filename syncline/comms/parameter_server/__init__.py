"""Parameters on servers: each server holds one shard; workers push gradients and pull parameters.

    partition.cut_rows   which part of the flat vector of all parameters each shard holds (`syncline.compute.partition`)
    chunks.py            which rows of which parameters a shard holds
    optimizer.py         a worker's optimizer on its way to the servers, its hyperparameters and state
    gradient.py          a gradient as it traveled, and as `.grad`
    shard.py             one shard: parameters, optimizer, version and the three rules; no sockets
    messages.py          the messages
    server.py            `serve`: the loop around one shard
    outgoing.py          a gradient, split along the shards
    channel.py           a worker's requests to one shard
    prefetch.py          background fetches
    client.py            `ParameterServers`: a worker's view of all shards

Not here: when a worker pushes and pulls (strategies), the connections (`comms/connection.py`, `comms/listener.py`), and
starting the servers (`engines/`, `coordinator/`).
"""
