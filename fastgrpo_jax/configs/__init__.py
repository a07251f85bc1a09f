"""Run configurations; `default.py` holds every key with its unit and reason."""
