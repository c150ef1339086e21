"""The exported model."""
