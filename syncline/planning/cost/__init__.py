"""What a step costs: pure functions from a profile, a strategy's traffic and a network to a sum of named terms."""
