"""The cheapest plan within the caps, and a bound on all of them."""
