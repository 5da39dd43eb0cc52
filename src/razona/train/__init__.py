"""Loops: one file, one loop. They never import each other."""
