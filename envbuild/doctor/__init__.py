"""What a host has and what follows from it."""
