"""The commands on one capture: run, replay, minify, fuzz, doctor, demo."""
