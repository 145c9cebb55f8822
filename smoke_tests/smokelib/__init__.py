"""What the smoke tests share. Imports only the standard library and torch, and parses on Python 3.8."""
