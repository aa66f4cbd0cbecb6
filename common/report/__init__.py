"""Figures and HTML pages of runs, and studies over several seeds."""
