"""What every loop shares, and no model: console, run folder, checkpoints, progress, steps."""
