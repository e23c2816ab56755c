"""Graph networks: what all of them share. The networks themselves are in `models/zoo/`, one file each."""
