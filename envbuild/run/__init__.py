"""The container that training runs in, on one host or several."""
