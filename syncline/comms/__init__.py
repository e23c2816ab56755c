"""Communication between the processes of a run: collectives, parameter servers, codecs, the control channel."""
