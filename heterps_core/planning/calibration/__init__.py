"""Corrects profiles by the speed of past runs."""
