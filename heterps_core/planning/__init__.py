"""From profiles and prices to a plan: problem, cost model, search, explanation, simulation."""
