"""The ops of the graph IR. Each has one definition, which contains all that the compiler knows of it."""
