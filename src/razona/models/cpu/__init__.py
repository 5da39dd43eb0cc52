"""What makes a CPU fast, behind one interface."""
