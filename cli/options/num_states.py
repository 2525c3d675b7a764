"""--num-states of the commands that make an engine."""

STATES_HELP = "Sequences whose states have room, for models whose layers have states; 0: by --kv-bytes and the limits."
