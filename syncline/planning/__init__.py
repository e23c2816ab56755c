"""What Syncline decides before anything starts: pure, printable, and the only truth the workers know."""
