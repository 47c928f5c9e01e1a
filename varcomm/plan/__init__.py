"""Plans: who sends which rows to whom, checked once and used many times."""
