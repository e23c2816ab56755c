"""Settings as data: checked on construction; from Python, flags or a TOML file."""
