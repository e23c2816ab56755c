"""`syncline serve --engine ray`: the server's engine in the replicas of a Ray Serve deployment."""
