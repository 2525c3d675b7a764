"""The ops of the graph IR: one definition each, which is all that the compiler knows of it."""
