"""Commands that plan, measure and simulate, without a run."""
