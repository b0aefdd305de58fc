"""The controller core."""
