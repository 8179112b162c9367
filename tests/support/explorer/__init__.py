"""Explores every interleaving of the real protocol cores in small worlds."""
