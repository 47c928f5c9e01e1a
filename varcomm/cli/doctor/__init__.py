"""``varcomm doctor``: what is installed, what the machine has, and what works when it is tried."""
