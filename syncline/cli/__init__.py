"""The command line. It reads flags and files, calls the driver, and turns exceptions into messages."""
