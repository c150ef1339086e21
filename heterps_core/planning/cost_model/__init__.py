"""What a plan costs by the closed form."""
