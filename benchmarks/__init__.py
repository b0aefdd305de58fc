"""What the barrier and the controller cost: one question per `bench_*.py`, each prints a table."""
