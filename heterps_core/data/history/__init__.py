"""Histories by pointer: the last events of a row's key before its time, joined while rows are read."""
