"""How commands show things in a terminal."""
