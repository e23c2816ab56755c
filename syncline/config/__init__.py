"""What the user may set, as data: checked on construction, read from Python, flags or one TOML file."""
