"""Parts that every command shares: its command line, its errors, its files, the versions it tells."""
