"""Commands around plans: machines, times, searches and simulations."""
