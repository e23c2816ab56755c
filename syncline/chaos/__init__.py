"""Breaking runs on purpose, and keeping the score: it starts runs through the driver and reads what they leave."""
