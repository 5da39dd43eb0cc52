"""Sampling and scoring: groups, their rewards, dynamic sampling, difficulty, metrics, evaluation."""
