"""`syncline survey`: what the published surveys of frameworks asked, measured again on this machine."""
