"""What every HTML page of Syncline shares: the document around it, its looks, and round numbers for axes."""
