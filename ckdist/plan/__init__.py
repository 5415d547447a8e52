"""Annex: predicts, compares and simulates models on described machines. Only commands import it."""
