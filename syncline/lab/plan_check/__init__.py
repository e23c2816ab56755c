"""`syncline plan --check`: predictions of `syncline plan` against short real runs."""
