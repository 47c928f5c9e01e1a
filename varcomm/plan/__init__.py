"""Exchange plans: which rows go to which rank, checked once and used many times."""
