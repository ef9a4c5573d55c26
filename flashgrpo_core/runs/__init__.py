"""Everything a run leaves on disk: its folder, events, checkpoints and report."""
